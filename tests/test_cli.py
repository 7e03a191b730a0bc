"""Every command: its help, its result as text and as JSON, and one sentence for each kind of bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import remat as package
from commands import remat
from remat.cli import app
from remat.units import parse_bytes

COMMANDS = ["bench", "compare", "demo", "devices", "doctor", "explain", "plan"]

JOB = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

def loss(output, batch):
    return output.square().mean()

def build():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4))), torch.randn(8, 32, 16), loss

def as_dict():
    model, batch, loss = build()
    return {"model": model, "batch": batch, "loss": loss}

def as_functions():
    return {"model": lambda: build()[0], "batch": lambda: build()[1], "loss": loss}

def bare_loss():
    return (*build()[:2], 3)

def raises():
    raise ValueError("no such width: 7")

def model_raises():
    class Broken(Block):
        def forward(self, x):
            raise RuntimeError("shapes do not match")
    return nn.Sequential(Broken(), Broken()), torch.randn(2, 16), loss

def no_loss():
    return build()[:2]

def nothing():
    return None

def one():
    return build()[:1]

def wrong_names():
    return {"net": 1, "batch": 2}

def no_model():
    return "gpt2", torch.zeros(1)

number = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "job.py").write_text(JOB)
    (folder / "broken.py").write_text("import torch\n1 / 0\n")
    (folder / "missing_import.py").write_text("import no_such_library\n")
    made = remat("plan", f"{folder}/job.py:build", "--activations", "0.6", "--out", f"{folder}/plan.json")
    assert made.code == 0, made.err
    saved = json.loads((folder / "plan.json").read_text())
    (folder / "old.json").write_text(json.dumps({**saved, "schema": 0}))
    (folder / "profile.json").write_text(json.dumps({**saved["profile"], "remat": "Profile"}))
    (folder / "damaged.json").write_text(json.dumps({**saved, "profile": {}}))
    (folder / "cut.json").write_text((folder / "plan.json").read_text()[:500])
    (folder / "binary.json").write_bytes(b"\xff\xfe\x00\x80")
    return folder


# ---------------------------------------------------------------------------------------------------- help


def test_the_commands_are_these():
    group = typer.main.get_command(app)
    assert sorted(group.commands) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_complete(name):
    command = typer.main.get_command(app).commands[name]
    assert command.help
    for parameter in command.params:
        assert getattr(parameter, "help", ""), f"{name}: {parameter.name} says nothing"
    options = {option for parameter in command.params for option in parameter.opts}
    assert {"--json", "--debug"} <= options
    shown = remat(name, "--help")
    assert shown.code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.out)
    for option in options - {parameter.name for parameter in command.params}:
        assert option in plain or option.upper() in plain


def test_without_arguments_help_is_shown():
    shown = remat()
    assert "explain" in shown.out + shown.err


# ------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("function", ["build", "as_dict", "as_functions"])
def test_plan_measures_here(folder, function):
    ran = remat("plan", f"{folder}/job.py:{function}", "--activations", "0.6", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["predicted_peak_bytes"] <= ran.json["budget_bytes"] < ran.json["plain_peak_bytes"]
    assert len(ran.json["regions"]) == 4


@pytest.mark.parametrize("function", ["build", "as_functions"])
def test_plan_estimates_for_a_device(folder, function, tmp_path):
    ran = remat(
        "plan", f"{folder}/job.py:{function}", "--budget", "80%", "--device", "rtx4090",
        "--dtype", "bf16", "--optimizer", "adamw", "--out", str(tmp_path / "plan.json"),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "on rtx4090" in ran.out
    saved = package.Plan.load(tmp_path / "plan.json")
    assert saved.budget_bytes == parse_bytes("80%", total=saved.profile.environment.total_bytes)
    assert saved.profile.step.optimizer_state > 0
    values = saved.profile.kinds[0].graph.values
    assert {value.dtype for value in values} == {"bfloat16"} or "bfloat16" in {v.dtype for v in values}


def test_explain_names_every_region_and_tensor(folder):
    ran = remat("explain", f"{folder}/plan.json", "--all")
    assert ran.code == 0, ran.err
    for part in ("0", "1", "2", "3", "gelu", "recompute", "job.py:", "rebuilt when backward asks for it"):
        assert part in ran.out
    data = remat("explain", f"{folder}/plan.json", "--json").json
    assert [row["name"] for row in data[0]["regions"]] == ["0", "1", "2", "3"]
    tensors = [tensor for group in data[0]["tensors"] for tensor in group["tensors"]]
    assert tensors
    for tensor in tensors:
        assert tensor["nbytes"] > 0
        assert tensor["reason"]
        assert tensor["action"] in ("keep", "recompute", "offload")
        assert tensor["source"].startswith("job.py:") or tensor["operation"] == "input"


def test_compare_shows_every_strategy(folder):
    ran = remat("compare", f"{folder}/plan.json", f"{folder}/plan.json")
    assert ran.code == 0, ran.err
    assert ran.out.count("optimal") == 2
    rows = remat("compare", f"{folder}/plan.json", "--json").json[0]["strategies"]
    names = {row["strategy"] for row in rows}
    assert names >= {"optimal", "none", "full", "sqrt(L)", "memory-first", "compute-first", "uniform every 2"}
    fastest = min((row for row in rows if row["feasible"]), key=lambda row: row["seconds"])
    assert fastest["strategy"] == "optimal"


def test_bench_measures_every_way(folder):
    ran = remat(
        "bench",
        f"{folder}/job.py:build",
        "--activations",
        "0.6",
        "--budget",
        "1KiB",
        "--repeats",
        "1",
        "--json",
    )
    assert ran.code == 0, ran.err
    plain, blocks, unreachable, fitted = ran.json
    assert plain["way"] == "plain"
    assert blocks["activation_bytes"] < plain["activation_bytes"]
    assert "out of reach" in unreachable["failed"]
    assert fitted["activation_bytes"] <= 0.62 * plain["activation_bytes"]
    assert fitted["bitwise"] is True
    table = remat("bench", f"{folder}/job.py:build", "--activations", "0.6", "--repeats", "1")
    assert "fit 60% of activations" in table.out


def test_devices_are_listed():
    assert "rtx4090" in remat("devices").out
    listed = remat("devices", "--json").json
    assert {device["name"] for device in listed} == set(package.devices.DEVICES)


def test_reading_a_plan_needs_no_torch(folder):
    path = str(folder / "plan.json")
    code = f"import sys; sys.modules['torch'] = None; sys.argv = ['remat', 'explain', {path!r}]"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nfrom remat.cli import main\nmain()"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gelu" in done.stdout


# --------------------------------------------------------------------------------------------- bad input

BAD = {
    "no file": (["plan", "nowhere.py:build", "--budget", "1GiB"], "there is no file nowhere.py"),
    "no module": (["plan", "no_such_module_x:build", "--budget", "1GiB"], "there is no module"),
    "no function named": (["plan", "{f}/job.py", "--budget", "1GiB"], "does not say what to train"),
    "no such attribute": (["plan", "{f}/job.py:buidl", "--budget", "1GiB"], "did you mean 'build'"),
    "not a function": (["plan", "{f}/job.py:number", "--budget", "1GiB"], "is a int; it must be a function"),
    "a file that raises": (["plan", "{f}/broken.py:build", "--budget", "1GiB"], "ZeroDivision.*broken.py:2"),
    "a missing library": (["plan", "{f}/missing_import.py:build", "--budget", "1GiB"], "no_such_library"),
    "a factory that raises": (["plan", "{f}/job.py:raises", "--budget", "1GiB"], "no such width: 7 .job.py:"),
    "the same, estimated": (
        ["plan", "{f}/job.py:raises", "--budget", "1GiB", "--device", "t4"], "no such width: 7 .job.py:"
    ),
    "a factory of nothing": (["plan", "{f}/job.py:nothing", "--budget", "1GiB"], "returned a NoneType"),
    "a factory of one thing": (["plan", "{f}/job.py:one", "--budget", "1GiB"], "returned 1 things"),
    "wrong names": (["plan", "{f}/job.py:wrong_names", "--budget", "1GiB"], "a dict with 'net', 'batch'"),
    "no model": (["plan", "{f}/job.py:no_model", "--budget", "1GiB"], "model is a str"),
    "a loss that is a number": (["plan", "{f}/job.py:bare_loss", "--budget", "1GiB"], "loss is a int"),
    "no loss": (["plan", "{f}/job.py:no_loss", "--budget", "1GiB"], "pass loss="),
    "neither limit": (["plan", "{f}/job.py:build"], "exactly one of the two"),
    "both limits": (["plan", "{f}/job.py:build", "--budget", "1GiB", "--activations", "0.5"], "exactly one"),
    "a budget that is none": (["plan", "{f}/job.py:build", "--budget", "lots"], "not a number of bytes"),
    "a share of no device": (["plan", "{f}/job.py:build", "--budget", "80%"], "memory size is known"),
    "a budget out of reach": (["plan", "{f}/job.py:build", "--budget", "1KiB"], "is the least this step"),
    "an unknown device": (["plan", "{f}/job.py:build", "--budget", "1GiB", "--device", "h1"], "h100-80gb"),
    "an unknown dtype": (["plan", "{f}/job.py:build", "--budget", "1GiB", "--dtype", "int8"], "bfloat16"),
    "an unknown optimizer": (["plan", "{f}/job.py:build", "--budget", "1GiB", "--optimizer", "adan"], "adam"),
    "an unknown action": (["plan", "{f}/job.py:build", "--budget", "1GiB", "--allow", "forget"], "recompute"),
    "compile, estimated": (
        ["plan", "{f}/job.py:build", "--budget", "1GiB", "--device", "t4", "--compile"], "leave out --device"
    ),
    "no folder": (["plan", "{f}/job.py:build", "--budget", "1GiB", "--out", "{f}/no/p.json"], "no folder"),
    "not an html name": (["plan", "{f}/job.py:build", "--budget", "1GiB", "--html", "p.pdf"], "in .html"),
    "explain: no file": (["explain", "{f}/none.json"], "there is no file .*none.json; make one with"),
    "explain: a folder": (["explain", "{f}"], "cannot be read as a plan"),
    "explain: cut off": (["explain", "{f}/cut.json"], "cut.json: not JSON"),
    "explain: binary": (["explain", "{f}/binary.json"], "cannot be read as a plan"),
    "explain: damaged": (["explain", "{f}/damaged.json"], "file is damaged"),
    "explain: other version": (["explain", "{f}/old.json"], "schema version 0"),
    "explain: a profile": (["explain", "{f}/profile.json"], "holds 'Profile', not a remat Plan"),
    "compare: no file": (["compare", "{f}/plan.json", "{f}/none.json"], "there is no file"),
    "compare: cut off": (["compare", "{f}/cut.json"], "not JSON"),
    "doctor: no attribute": (["doctor", "{f}/job.py:buidl"], "did you mean 'build'"),
    "doctor: raises": (["doctor", "{f}/job.py:raises"], "no such width: 7"),
    "bench: no attribute": (["bench", "{f}/job.py:buidl"], "did you mean 'build'"),
    "bench: raises": (["bench", "{f}/job.py:raises"], "no such width: 7"),
    "bench: budget": (["bench", "{f}/job.py:build", "--budget", "lots"], "not a number of bytes"),
    "demo: device": (["demo", "--device", "warp"], "--device warp cannot be used"),
    "an unknown option": (["plan", "--bugdet", "1GiB"], "No such option"),
    "an unknown command": (["paln"], "No such command"),
    "no argument": (["explain"], "Missing argument"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence_and_exit_code_2(folder, case):
    arguments, said = BAD[case]
    ran = remat(*(argument.replace("{f}", str(folder)) for argument in arguments))
    assert ran.code == 2
    assert ran.out == ""
    assert re.search(said, ran.err.replace("\n", " ")), ran.err
    assert "Traceback" not in ran.err
    if ran.err.startswith("remat: "):
        assert ran.err.count("\n") == 1


def test_what_fails_unexpectedly_is_one_line_too(folder):
    ran = remat("plan", f"{folder}/job.py:model_raises", "--activations", "0.5")
    assert ran.code == 1
    assert "RuntimeError: shapes do not match (job.py:" in ran.err
    assert "Traceback" not in ran.err


def test_debug_shows_where_an_error_comes_from(folder):
    with pytest.raises(package.InputError) as caught:
        remat("plan", f"{folder}/job.py:raises", "--budget", "1GiB", "--debug")
    assert isinstance(caught.value.__cause__, ValueError)
