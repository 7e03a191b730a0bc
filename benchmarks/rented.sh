#!/usr/bin/env bash
# What needs a GPU, in three parts of under ten minutes each, for a machine that is rented by the minute:
#
#     OUT=out FRONTIER_COMMIT=$(git rev-parse --short HEAD) bash benchmarks/rented.sh 1      (then 2, then 3)
#
# Rows go into $OUT/frontier.json, which begins as the one in benchmarks/results; remat's profiles, from which
# plans can be made anew on any machine, into $OUT/profiles-N.tar.xz. Every race has a limit of its own, says in
# its rows what that left out, and is ended if it hangs. Peers that are pure Python (trl, liger-kernel) may lie in
# $PEERS. torch.compile of whole models takes a minute each, and is left out.
set -u
part=${1:?which part: 1, 2 or 3}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-out}
mkdir -p "$OUT/profiles"
[ -f "$OUT/frontier.json" ] || cp benchmarks/results/frontier.json "$OUT/frontier.json"
export PYTHONPATH=src${PEERS:+:$PEERS} PYTHONUNBUFFERED=1
EAGER=plain,remat,unfused,checkpoint,selective,chunked-loss,offload
COMPILED=$EAGER,compiled,regional

race() { # workload, seconds, methods, rounds
    timeout $(($2 + 30)) python benchmarks/frontier.py --workloads "$1" --limit "$2" --methods "$3" --rounds "$4" \
        --profiles "$OUT/profiles" --out "$OUT/frontier.json" || echo "$1 ended with $?"
}

case $part in
    1)
        timeout 90 python -m pytest -q -m gpu -p no:cacheprovider tests || echo "GPU tests ended with $?"
        race llama-1.3b 280 "$COMPILED" 2
        race moe 110 "$COMPILED" 2
        race launch-bound 70 "$COMPILED" 3
        ;;
    2)
        race gpt2-774m 160 "$COMPILED" 2
        race vit-l16 140 "$COMPILED" 3
        race vit-b16 120 "$COMPILED" 3
        race resnet-152 110 "$EAGER" 2
        ;;
    3)
        race llama-7b 130 "$EAGER" 1
        race llama-7b-lora 120 "$EAGER" 1
        race video-dit 160 "$COMPILED" 2
        timeout 150 python benchmarks/frontier.py --longest --cap 16GiB --limit 120 --out "$OUT/frontier.json" ||
            echo "the longest context ended with $?"
        ;;
    *)
        echo "there is no part $part: 1, 2 or 3" >&2
        exit 2
        ;;
esac
tar -C "$OUT" -cJf "$OUT/profiles-$part.tar.xz" profiles && rm -r "$OUT/profiles"
