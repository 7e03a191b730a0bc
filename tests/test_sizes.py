"""What a few measured sizes say of all others: exact where it must be, never too low where it may be."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remat.planner.schedule import with_chunks
from remat.planner.sizes import MisfitError, chord, family, polynomial, template, with_rows, without_recipes
from remat.records import (
    Entry,
    Environment,
    HeadChunks,
    Kind,
    Mode,
    Op,
    Phase,
    Profile,
    Recipe,
    Ref,
    RegionCall,
    RegionGraph,
    Segment,
    StepBytes,
    Value,
)
from remat.trace.sizes import Chart, Place, growth_between, shapes_of, smaller_batches

SIZES = (168, 680, 2048)


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 9), st.integers(1, 9999))
def test_polynomials_are_found_exactly(a, b, c, size):
    values = [a + b * n + c * n * n for n in SIZES]
    assert polynomial(SIZES, values)(size) == a + b * size + c * size * size


def test_what_is_not_whole_is_refused():
    padded = [-(-n // 32) * 32 for n in (100, 680, 2048)]  # rounded up to multiples of 32
    found = polynomial((100, 680, 2048), padded)
    with pytest.raises(MisfitError, match="at the measured sizes"):
        [found(n) for n in range(700, 720)]
    with pytest.raises(MisfitError):
        polynomial((2, 4), (10, 0))(6)  # below 0


@given(st.lists(st.integers(0, 50), min_size=3, max_size=3), st.integers(1, 2048))
def test_a_chord_is_never_below_a_convex_quantity(coefficients, size):
    def nbytes(n):
        a, b, c = coefficients
        return max(a + b * n + c * n * n, 7 * n)  # the larger of two, as a peak is

    assert chord(SIZES, [nbytes(n) for n in SIZES], size) >= nbytes(size)


def test_chords_at_measured_sizes_are_what_was_measured():
    values = [5, 70, 900]
    assert [chord(SIZES, values, n) for n in SIZES] == values
    assert chord(SIZES, values, 1) == 5
    assert chord(SIZES, [n * n for n in SIZES], 4096) == 4096**2  # beyond: the parabola
    assert chord(SIZES, list(SIZES), 4096) == 4096
    assert chord((10,), (100,), 20) == 200


@dataclass(frozen=True)
class Thing:
    name: str
    shape: tuple[int, ...]
    scale: float = 0.5


def test_templates_keep_what_stays_and_share_it():
    things = [Thing("x", (4, n, n * n)) for n in SIZES]
    made = template(SIZES, things)(100)
    assert made == Thing("x", (4, 100, 10000))
    assert template(SIZES, [things[0]] * 3)(100) is things[0]


@pytest.mark.parametrize(
    "changed",
    [
        replace(Thing("x", (4, 1)), name="y"),
        Thing("x", (4, 1), scale=0.1),
        Thing("x", (4, 1, 1)),
        "x",
    ],
)
def test_templates_refuse_other_things(changed):
    with pytest.raises(MisfitError):
        template((1, 2), [Thing("x", (4, 1)), changed])


def test_signatures_are_texts_with_numbers():
    texts = [f"(Size([4, {n}, 64]), ({64 * n}, 64, 1), torch.bfloat16)" for n in SIZES]
    assert template(SIZES, texts)(7) == "(Size([4, 7, 64]), (448, 64, 1), torch.bfloat16)"
    with pytest.raises(MisfitError):
        template((1, 2), ["a1b", "a2c"])


# ------------------------------------------------------------------------------------------------ families


def graph_of(n, *, op="aten.mul.Tensor"):
    value = Value(0, 0, (n, 8), (8, 1), 0, "float32", 0, held=True)
    ops = (Op(op, (Ref(0),), (), (0,), (0,), seconds=1e-6 * n, flops=n),)
    return RegionGraph((), (value,), ops, (), (), (), (0,), (0,))


def profile_of(n, *, recipes=(2, 1), graph=graph_of, regions=2):
    menu = [Entry(Mode.KEEP, 100 * n, 120 * n, 130 * n, 0.0)]
    for number in recipes:
        recipe = Recipe(kept=(number,), dropped=(0,), replayed=(0,), resident_bytes=10 * number * n)
        menu.append(Entry(Mode.RECIPE, 10 * number * n, 120 * n, 140 * n, 1e-6 * n, recipe=recipe))
    menu.append(Entry(Mode.FULL, 0, 120 * n, 220 * n, 2e-6 * n))
    kind = Kind(f"Size([{n}, 8])", tuple(menu), 100 * n, 1e-5 * n, graph(n))
    segments = tuple(
        Segment(phase, call, start * n, (start + 130) * n, start * n)
        for phase, order in ((Phase.FORWARD, range(regions)), (Phase.BACKWARD, reversed(range(regions))))
        for start, call in enumerate(order)
    )
    calls = tuple(RegionCall(f"blocks.{i}", 0, 0, "blocks") for i in range(regions))
    return Profile(
        "Net", "f", f"[{n}]", Environment("cpu", "cpu", "2"), StepBytes(1000, other=4 * n), (kind,), calls,
        (), segments, 1e-4 * n,
    )  # fmt: skip


def test_a_family_tells_the_profile_of_any_size():
    made = family([(n, profile_of(n)) for n in (2048, 168, 680)])
    assert made.sizes == SIZES
    found = made.profile_at(1000)
    expected = profile_of(1000)
    assert found.segments == expected.segments
    assert [e.resident_bytes for e in found.kinds[0].menu] == [
        e.resident_bytes for e in expected.kinds[0].menu
    ]
    assert found.step == expected.step
    assert found.step_seconds == pytest.approx(expected.step_seconds)
    assert made.signature_at(0, 1000) == expected.kinds[0].signature
    assert made.graph_at(0, 1000).values == expected.kinds[0].graph.values
    assert made.graph_at(0, 680) == profile_of(680).kinds[0].graph
    assert made.profile_at(680) == profile_of(680)


def test_the_step_before_may_have_been_the_largest():
    def holding(n):
        found = profile_of(n)
        head = HeadChunks("head", found.segments, found.step_seconds, output_bytes=n)
        return replace(found, step=replace(found.step, outputs=50 * n), head=head)

    made = family([(n, holding(n)) for n in SIZES])
    for size in (100, *SIZES, 1000):
        found = made.profile_at(size)
        assert (found.step.outputs, found.head.output_bytes) == (50 * 2048, 2048)
    assert made.profile_at(4096).step.outputs == 50 * 4096
    found = made.profile_at(680, before=4096)
    assert (found.step.outputs, found.head.output_bytes) == (50 * 4096, 4096)
    assert with_chunks(made.profile_at(680)).step.outputs == 2048


def test_menus_are_what_all_sizes_have_in_common():
    made = family([(168, profile_of(168, recipes=(2,))), (680, profile_of(680)), (2048, profile_of(2048))])
    assert all(len(p.kinds[0].menu) == 3 for p in made.profiles)
    assert [e.recipe.kept for e in made.profiles[0].kinds[0].menu if e.recipe] == [(2,)]


def test_other_operations_at_another_size_leave_whole_regions():
    other = profile_of(680, graph=lambda n: graph_of(n, op="aten.add.Tensor"))
    made = family([(168, profile_of(168)), (680, other), (2048, profile_of(2048))])
    assert [e.mode for e in made.profile_at(300).kinds[0].menu] == [Mode.KEEP, Mode.FULL]
    assert "no recipes" in made.notes[0]
    with pytest.raises(MisfitError):
        made.graph_at(0, 300)


def test_another_step_at_another_size_is_no_family():
    with pytest.raises(MisfitError):
        family([(168, profile_of(168)), (680, profile_of(680, regions=3))])


def test_where_memory_goes_in_steps_the_next_measured_size_is_taken():
    made = replace(family([(n, profile_of(n)) for n in SIZES]), stepped=True)
    assert made.profile_at(169).segments == profile_of(680).segments
    assert made.profile_at(680).segments == profile_of(680).segments
    assert made.profile_at(10).segments == profile_of(168).segments


def test_more_rows_take_more_of_all_but_gradients():
    measured = profile_of(100)
    segments = tuple(
        replace(s, start_bytes=s.start_bytes + 7 * i, peak_bytes=s.peak_bytes + 7 * i,
                end_bytes=s.end_bytes + 7 * (i + 1), gradient_bytes=7 * (i + 1))
        for i, s in enumerate(measured.segments)
    )  # fmt: skip
    found = with_rows(replace(measured, segments=segments), 2.5, 30)
    expected = profile_of(250)
    gained = [s.gradient_bytes for s in segments]
    assert [s.gradient_bytes for s in found.segments] == gained
    assert [s.end_bytes - g for s, g in zip(found.segments, gained, strict=True)] == [
        s.end_bytes for s in expected.segments
    ]
    assert [s.peak_bytes - g for s, g in zip(found.segments, [0, *gained], strict=False)] == [
        s.peak_bytes for s in expected.segments
    ]
    assert [e.backward_peak_bytes for e in found.kinds[0].menu] == [
        e.backward_peak_bytes for e in expected.kinds[0].menu
    ]
    assert found.step.parameters == measured.step.parameters
    assert found.step.other == measured.step.other + 30


def test_without_recipes():
    assert [e.mode for e in without_recipes(profile_of(5)).kinds[0].menu] == [Mode.KEEP, Mode.FULL]


# --------------------------------------------------------------------------------------------------- charts


def shapes(rows, length, **more):
    return tuple(sorted([("ids", (rows, length)), ("labels", (rows, length)), *more.items()]))


CHART = Chart.of([shapes(4, n) for n in (2048, 168, 680)])


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (shapes(4, 2048), Place(2048, True)),
        (shapes(4, 1000), Place(1000, True)),
        (shapes(4, 100), Place(100, True)),
        (shapes(4, 3000), Place(3000, True)),
        (shapes(2, 1000), Place(1000, False)),  # fewer rows: no more than with four
        (shapes(8, 500), Place(1000, False)),  # twice the rows of half the length
        ((("ids", (4, 1000)), ("labels", (4, 900))), Place(1000, False)),
        ((("ids", (4, 1000)),), None),
        (shapes(4, 1000, mask=(4, 1, 1000, 1000)), None),
    ],
)
def test_where_a_batch_lies(given, place):
    assert CHART.place(given) == place


def test_rows_are_counted_apart_where_each_has_more_than_its_length():
    chart = replace(CHART, rows_as_length=False)
    assert chart.place(shapes(8, 500)) == Place(500, False, 2.0)
    assert chart.place(shapes(2, 500)) == Place(500, False)
    assert chart.place(shapes(4, 500)) == Place(500, True)


def test_a_dimension_that_never_varied_may_not_grow():
    chart = Chart.of([(("x", (4, n, 64)),) for n in (16, 64)])
    assert chart.place((("x", (4, 32, 64)),)) == Place(32, True)
    assert chart.place((("x", (4, 32, 65)),)) is None


def test_one_shape_alone():
    chart = Chart.of([shapes(4, 64)])
    assert chart.sizes == (1,)
    assert chart.place(shapes(4, 64)) == Place(1, True)
    assert chart.place(shapes(4, 63)) == Place(1, False)
    assert chart.place(shapes(4, 65)) is None
    assert chart.place(shapes(5, 64)) is None


def test_a_shape_that_is_there_twice_counts_once():
    assert Chart.of([shapes(4, n) for n in (64, 16, 64, 16)]) == Chart.of([shapes(4, n) for n in (64, 16)])
    assert Chart.of([shapes(4, 64)] * 2) == Chart.of([shapes(4, 64)])


@pytest.mark.parametrize("length", range(24, 60))
def test_short_sequences_are_cut_to_two_sizes(length):
    first, second = (b["ids"].shape[1] for b in smaller_batches({"ids": torch.ones(2, length, dtype=int)}))
    assert second < first < length


def test_shapes_that_lie_on_no_line():
    assert Chart.of([shapes(4, 64), shapes(8, 32)]) is None
    assert Chart.of([shapes(4, 64), (("ids", (4, 64)),)]) is None


def test_shapes_are_read_by_name_however_they_are_passed():
    class Net(torch.nn.Module):
        def forward(self, ids, mask=None, *rest, scale=1.0):
            pass

    read = shapes_of(Net())
    ids, mask = torch.ones(2, 3), torch.ones(2, 3, 3)
    expected = (("ids", (2, 3)), ("mask", (2, 3, 3)))
    assert read((ids, mask), {}) == expected
    assert read((ids,), {"mask": mask, "scale": torch.tensor(2.0)}) == expected
    assert read((), {"mask": [mask], "ids": ids}) == (("ids", (2, 3)), ("mask.0", (2, 3, 3)))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"ids": torch.ones(4, 240, dtype=int)}, [(4, 80), (4, 16)]),
        ({"x": torch.ones(4, 240, 64)}, [(4, 80, 64), (4, 16, 64)]),
        (torch.ones(4, 3, 32, 32), [(2, 3, 32, 32), (1, 3, 32, 32)]),
        ((torch.ones(8, 5),), [(4, 5), (2, 5)]),
        (torch.ones(1, 3, 32, 32), []),
    ],
)
def test_smaller_batches(batch, expected):
    found = [
        next(iter(b.values())) if isinstance(b, dict) else b[0] if isinstance(b, tuple) else b
        for b in smaller_batches(batch)
    ]
    assert [tuple(t.shape) for t in found] == expected
    assert all(t.is_contiguous() for t in found)


@pytest.mark.parametrize("pads", [slice(239, 240), slice(0, 1), slice(200, 240), slice(0, 100)])
def test_smaller_batches_keep_some_padding_and_something_beside_it(pads):
    mask = torch.ones(2, 240, dtype=int)
    mask[1, pads] = 0
    ids = torch.arange(480).view(2, 240)
    for made in smaller_batches({"ids": ids, "mask": mask}):
        assert made["mask"].shape == made["ids"].shape
        assert made["mask"][0].all()
        assert 0 < made["mask"][1].sum() < made["mask"].shape[1]
        assert torch.equal(made["ids"], ids[:, : made["ids"].shape[1]])


@pytest.mark.parametrize(
    ("given", "growth"),
    [
        (shapes(4, 64), 1),
        (shapes(2, 60), 1),
        (shapes(8, 32), 2),  # whatever each row has apart from its length
        (shapes(2, 128), 4),
        (shapes(1, 256), 16),
        (shapes(8, 128), 16),
        (shapes(4, 64, mask=(4, 64)), 2.25),
        (shapes(1, 8, mask=(1, 128)), 4),
    ],
)
def test_how_much_more_other_inputs_may_take(given, growth):
    assert growth_between(shapes(4, 64), given) == growth


def test_two_lengths_shrink_together():
    batch = {"ids": torch.ones(2, 240, dtype=int), "labels": torch.ones(2, 96, dtype=int)}
    mask = torch.ones(2, 1, 240, 240)
    found = smaller_batches({**batch, "mask": mask})
    assert [[tuple(t.shape) for t in b.values()] for b in found] == [
        [(2, 80), (2, 32), (2, 1, 80, 80)],
        [(2, 16), (2, 8), (2, 1, 16, 16)],
    ]
