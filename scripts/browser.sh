#!/usr/bin/env bash
# Chromium for the tests of the HTML report: one that is there, or Debian's package where we may install it.
# Where there is none to be had, the tests say so and are skipped.
set -u

for name in "${REMAT_CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
  if [ -n "$name" ] && command -v "$name" >/dev/null; then
    exit 0
  fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "browser.sh: no Chromium here, and no right to install one; set REMAT_CHROMIUM to its path" >&2
  exit 0
fi
echo "browser.sh: installing Chromium for the tests of the HTML report" >&2
export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null 2>&1; }
install || { apt-get update -qq >/dev/null 2>&1 && install; } || echo "browser.sh: apt-get could not install chromium" >&2
exit 0
