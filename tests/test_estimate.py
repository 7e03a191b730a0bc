"""Profiles without the device, against real steps on the CPU, where both can be had."""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from torch import nn

import remat
from models import ZOO, Case, own_loss
from remat import codec
from remat.api import plan
from remat.check.peak import step_peak
from remat.check.step import run_step
from remat.devices import Device
from remat.errors import BudgetError, InputError, PlanError
from remat.estimating import estimate_profile
from remat.handle import apply
from remat.planner.schedule import keep_everything
from remat.planner.simulate import simulate
from remat.records import Mode, Plan

HOST = Device("host", 2**34, 1e10, 1e11, 1e11, launch_seconds=1e-6, type="cpu")
CPU = torch.device("cpu")


# ---------------------------------------------------- models whose activations outweigh their parameters


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    tokens = torch.randint(3, 64, (4, 64))
    return Case(LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}, own_loss)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=1
    )
    tokens = torch.randint(3, 64, (4, 64))
    return Case(GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}, own_loss)


def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    tokens = torch.randint(3, 64, (4, 64))
    mask = torch.ones_like(tokens)
    mask[0, 40:] = 0  # the model reads this: something is padded
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
    return Case(BertForMaskedLM(config), batch, own_loss)


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=32,
        patch_size=4, num_labels=4,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(4, (4,))}
    return Case(ViTForImageClassification(config), batch, own_loss)


CASES = {"llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit, "resnet": ZOO["resnet"]}


def estimated(case, build, **options):
    return estimate_profile(
        lambda: build().model.train(), lambda: case.batch, HOST, loss=case.loss, **options
    )


def confirmed(made: Plan) -> Plan:
    """As if it had been measured: only a test may say so."""
    return replace(
        made, profile=replace(made.profile, environment=replace(made.profile.environment, estimated=False))
    )


def above(profile, choices):
    return simulate(profile, choices).peak_bytes - profile.step.resident


@pytest.mark.parametrize("name", CASES)
def test_estimated_peaks_are_those_of_real_steps(name):
    case = CASES[name]()
    case.model.train()
    profile = estimated(case, CASES[name])
    assert not any(entry.measured for kind in profile.kinds for entry in kind.menu)

    def run():
        return run_step(case.model, case.batch, case.loss)

    plain = step_peak(case.model, run, CPU).above_bytes
    assert above(profile, keep_everything(profile)) == pytest.approx(plain, rel=0.02)
    case.model.zero_grad()
    budget = profile.step.resident + max(plain // 2, int(0.6 * plain) if name == "resnet" else 0)
    half = plan(profile, budget=budget)
    with apply(case.model, confirmed(half)) as handle:
        real = step_peak(case.model, run, CPU).above_bytes
        assert sum(region.counts.fallbacks for region in handle.regions) == 0
    assert half.predicted_peak_bytes - profile.step.resident == pytest.approx(real, rel=0.03)


def test_a_model_that_exists_is_left_as_it_was():
    case = ZOO["tied"]()
    before = {name: (id(p), p.clone()) for name, p in case.model.named_parameters(remove_duplicate=False)}
    profile = estimate_profile(case.model, case.batch, HOST, loss=case.loss)
    for name, parameter in case.model.named_parameters(remove_duplicate=False):
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None
    weight = case.model.embed.weight
    assert profile.step.parameters < sum(
        p.nbytes for _, p in case.model.named_parameters(remove_duplicate=False)
    )
    assert profile.step.parameters >= weight.nbytes


# ------------------------------------------------------------------------------- on an accelerator's terms


class DropBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, x):
        q = self.up(x).view(4, 8, 2, 8).transpose(1, 2)
        x = x + nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).transpose(1, 2).reshape(
            4, 8, 16
        )
        return self.drop(self.down(x))


def dropping(device):
    return estimate_profile(
        lambda: nn.Sequential(*[DropBlock() for _ in range(3)]),
        lambda: torch.randn(4, 8, 16),
        device,
        loss=lambda output, batch: output.square().mean(),
    )


def test_dropout_is_priced_as_the_device_runs_it():
    """A mask of one byte per element, attention without a mask, and neither of them replayed."""
    host, device = dropping(HOST), dropping("t4")
    ops = {op.name: op for op in device.kinds[-1].graph.ops}
    assert ops["aten.native_dropout.default"].reason == "draws random numbers"
    assert ops["aten._scaled_dot_product_flash_attention_for_cpu.default"].reason == "draws random numbers"
    assert device.kinds[-1].saved_bytes < host.kinds[-1].saved_bytes
    mask = device.kinds[-1].graph.values[ops["aten.native_dropout.default"].outputs[1]]
    assert mask.dtype == "bool"


def test_faster_devices_take_less_time_for_the_same_bytes():
    fast, slow = (
        dropping(Device("fast", 2**34, 1e12, 1e14, 1e14)),
        dropping(Device("slow", 2**34, 1e9, 1e11, 1e11)),
    )
    assert fast.step_seconds < slow.step_seconds
    assert [k.saved_bytes for k in fast.kinds] == [k.saved_bytes for k in slow.kinds]


def test_dtype_halves_the_weights():
    case = ZOO["llama"]()
    whole = estimate_profile(lambda: ZOO["llama"]().model, case.batch, "t4")
    half = estimate_profile(lambda: ZOO["llama"]().model, case.batch, "t4", dtype=torch.bfloat16)
    assert half.step.parameters * 2 == whole.step.parameters
    assert half.step.gradients * 2 == whole.step.gradients


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ("adamw", 2),
        ("SGD", 0),
        (torch.optim.Adam, 2),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
    ],
)
def test_optimizers(optimizer, states):
    case = ZOO["mlp"]()
    profile = estimate_profile(case.model, case.batch, "t4", loss=case.loss, optimizer=optimizer)
    assert profile.step.optimizer_state == pytest.approx(states * profile.step.parameters, rel=0.01)


def test_accumulation_starts_with_gradients():
    case = ZOO["mlp"]()
    once = estimate_profile(case.model, case.batch, HOST, loss=case.loss, accumulate=1)
    twice = estimate_profile(case.model, case.batch, HOST, loss=case.loss, accumulate=2)
    assert not once.accumulate
    assert twice.accumulate
    assert (
        simulate(twice, keep_everything(twice)).peak_bytes > simulate(once, keep_everything(once)).peak_bytes
    )


# ---------------------------------------------------------------------------------------- what it is for


def test_a_plan_can_be_saved_and_compared_but_not_applied():
    case = llama()
    profile = estimate_profile(lambda: llama().model, case.batch, "h100-80gb")
    assert any("estimate for h100-80gb" in note for note in profile.notes)
    made = plan(profile, activations=0.6)
    assert codec.from_json(Plan, codec.to_json(made)) == made
    with pytest.raises(PlanError, match=r"estimate for h100-80gb.*remat\.fit"):
        apply(case.model, made)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"device": "h10"}, "did you mean"),
        ({"optimizer": "adamww"}, "did you mean adamw"),
        ({"model": lambda: 3}, "factory returned a int"),
        ({"model": lambda: nn.Identity()}, "no parameters"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "pass its class"),
        (
            {"model": lambda: nn.Linear(torch.ones(1).cumsum(0).argmax().item() + 1, 2)},
            "cannot be built without memory",
        ),
    ],
)
def test_errors_say_what_to_do(change, sentence):
    case = ZOO["mlp"]()
    given = {"model": case.model, "batch": case.batch, "device": "t4", "loss": case.loss, **change}
    with pytest.raises(InputError, match=sentence):
        estimate_profile(given.pop("model"), given.pop("batch"), given.pop("device"), **given)


def test_profile_with_a_device_is_an_estimate():
    case = ZOO["mlp"]()
    found = remat.profile(lambda: ZOO["mlp"]().model, lambda: case.batch, loss=case.loss, device="t4")
    assert found.environment.estimated
    assert found == remat.profile(case.model, case.batch, loss=case.loss, device="t4")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "t4", "step": lambda: None}, "no step="),
        ({"dtype": torch.bfloat16}, "dtype= belongs to an estimate"),
        ({"optimizer": "adamw"}, "optimizer itself"),
        ({"model": lambda: None}, "needs device="),
    ],
)
def test_profile_tells_estimates_and_measurements_apart(options, sentence):
    case = ZOO["mlp"]()
    given = {"model": case.model, "batch": case.batch, "loss": case.loss, **options}
    with pytest.raises(InputError, match=sentence):
        remat.profile(given.pop("model"), given.pop("batch"), **given)


def test_what_an_h200_measured():
    """24 layers, hidden 2048, batch 4 x 4096, bf16, measured on an H200 with gradients resident: activations
    of the untouched step peak at 43.6 GB, recomputing every layer takes 0.187 of that and 1.283 of the time,
    and recipes at four budgets take the time below."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
    )

    def batch():
        tokens = torch.randint(32000, (4, 4096))
        return {"input_ids": tokens, "labels": tokens}

    profile = estimate_profile(
        lambda: LlamaForCausalLM(config), batch, "h200", dtype=torch.bfloat16, accumulate=True
    )
    resident = profile.step.resident + profile.step.gradients
    plain = simulate(profile, keep_everything(profile))
    full = simulate(profile, [profile.kinds[call.kind].reference for call in profile.calls])
    activations = plain.peak_bytes - resident
    assert activations == pytest.approx(43.6e9, rel=0.02)
    assert (full.peak_bytes - resident) / activations == pytest.approx(0.187, abs=0.005)
    assert full.seconds / plain.seconds == pytest.approx(1.283, abs=0.06)
    for share, slowdown in ((0.686, 1.033), (0.576, 1.057), (0.409, 1.118), (0.299, 1.156)):
        made = plan(profile, activations=share, allow=["keep", "recompute"])
        assert made.predicted_seconds / made.plain_seconds == pytest.approx(slowdown, abs=0.03)
        sending = plan(profile, activations=share)  # what copies cost is more than cheap replays do
        assert sending.predicted_seconds <= made.predicted_seconds
        assert sending.predicted_seconds < made.predicted_seconds or share == 0.686


class Router(nn.Module):
    """Sends rows where their values say: how many, only values tell."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        chosen = (x[:, 0] > 0).nonzero().flatten()
        return self.right(x).index_add(0, chosen, self.left(x[chosen]))


def test_steps_that_depend_on_values_are_refused_with_the_line():
    with pytest.raises(InputError, match=r"test_estimate\.py:\d+.*on the device"):
        estimate_profile(
            lambda: nn.Sequential(Router(), Router()),
            lambda: torch.randn(4, 16),
            "t4",
            loss=lambda output, batch: output.sum(),
        )


class Wrong(nn.Module):
    def forward(self, x):
        return x @ torch.ones(3, 3)


def test_steps_that_do_not_run_are_refused_with_the_line():
    with pytest.raises(InputError, match=r"Sequential does not run .*test_estimate\.py:\d+.*on the device"):
        estimate_profile(
            lambda: nn.Sequential(nn.Linear(16, 16), Wrong()),
            lambda: torch.randn(4, 16),
            "t4",
            loss=lambda output, batch: output.sum(),
        )


SEVEN_BILLION = textwrap.dedent("""
    import json, resource, time
    start = time.perf_counter()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from remat.api import plan
    from remat.errors import BudgetError
    from remat.estimating import estimate_profile

    config = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                         num_attention_heads=32)

    def batch():
        tokens = torch.randint(32000, (2, 4096))
        return {"input_ids": tokens, "labels": tokens}

    profile = estimate_profile(lambda: LlamaForCausalLM(config), batch, "h100-80gb", optimizer="adamw",
                               dtype=torch.bfloat16)
    answer = {"parameters": profile.step.parameters}
    for budget in ("40GB", "80GB"):
        try:
            made = plan(profile, budget=budget)
            answer[budget] = [made.predicted_peak_bytes, made.predicted_seconds / made.plain_seconds]
            answer["plain"] = made.plain_peak_bytes
        except BudgetError as error:
            answer[budget] = error.needed
    answer["seconds"] = time.perf_counter() - start
    answer["rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(answer))
""")


@pytest.mark.slow  # test_docs.py has such a model, without an optimizer, from the command line
def test_seven_billion_parameters_on_a_laptop():
    """Will LLaMA-7B at batch 2 x 4096 train on 40 GB, on 80 GB, and how much slower?"""
    done = subprocess.run([sys.executable, "-c", SEVEN_BILLION], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["parameters"] == 2 * 6_738_415_616
    assert (
        answer["40GB"] > 5 * answer["parameters"]
    )  # weights, gradients, two states, the optimizer's temporary
    peak, slowdown = answer["80GB"]
    assert peak <= 80e9 < answer["plain"]
    assert 1.0 < slowdown < 1.15
    assert answer["rss_bytes"] < 4 * 2**30
    assert answer["seconds"] < 60


def test_a_budget_that_no_plan_meets():
    case = llama()
    profile = estimate_profile(lambda: llama().model, case.batch, "t4", optimizer="adamw")
    with pytest.raises(BudgetError) as error:
        plan(profile, budget=profile.step.resident)
    least = plan(profile, budget=error.value.needed)
    assert least.predicted_peak_bytes <= error.value.needed
    assert any(least.entry(i).mode is not Mode.KEEP for i in range(len(profile.calls)))
