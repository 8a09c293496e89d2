"""The choice of tiles, which needs no GPU: what a device can run, and in which order."""

import dataclasses

import pytest
import torch
from checks import H200

from ksopt.bench.paper_patterns import stratified_sample
from ksopt.kernels import launcher, registry
from ksopt.kernels.families.base import KernelFamily, families
from ksopt.kernels.problem import DeviceSpec, Problem, SecondLayer
from ksopt.kernels.registry import MOST_KERNELS, best_kernels, ranked
from ksopt.patterns.chain import Chain, Pattern

A100 = DeviceSpec((8, 0), 108, 164 * 1024)
RTX = DeviceSpec((12, 0), 170, 100 * 1024)
T4 = DeviceSpec((7, 5), 40, 64 * 1024)

FAMILIES = [family for family in families() if not family.is_fallback]
PROBLEMS = [
    Problem.of_factor(pattern, dtype, last)
    for pattern in (*stratified_sample(12, seed=2), Pattern(2, 8, 8, 64))  # and one of short sums
    for dtype in ("float32", "float16", "bfloat16")
    for last in (False, True)
]
CHAIN = Chain.parse("(1,192,48,2)*(2,48,192,1)")
CHAINS = [Problem(CHAIN, "bfloat16", False)]
LEFT, RIGHT = (Chain((factor,)) for factor in CHAIN)
MLPS = [
    Problem(first, "bfloat16", False, second=SecondLayer(second))
    for first, second in ((CHAIN, CHAIN), (RIGHT, LEFT))
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_has_tiles_for_some_patterns(family: KernelFamily) -> None:
    batches = (16, 25_088)  # some families are for few rows only
    problems = MLPS if family.takes_mlps else CHAINS if family.takes_chains else PROBLEMS
    assert any(ranked(family, problem, rows, H200) for problem in problems for rows in batches)


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(H200, id="H200"),
        pytest.param(A100, id="A100", marks=pytest.mark.slow),
        pytest.param(RTX, id="RTX", marks=pytest.mark.slow),
    ],
)
def test_tiles_fit_and_come_by_predicted_time(device: DeviceSpec) -> None:
    for problem in PROBLEMS:
        for family in FAMILIES:
            tiles = ranked(family, problem, 1000, device)
            times = [kernel.predicted_us for kernel in tiles]
            assert times == sorted(times)
            assert all(us > 0 for us in times)
            for kernel in tiles:
                assert family.shared_bytes(problem, kernel.tile) <= device.shared_bytes - 1024


def test_instructions_of_one_capability_stay_there() -> None:
    only = {family.name for family in FAMILIES if family.capability_only}
    assert only >= {"wgmma_tf32x3", "batch_last_wgmma16"}
    for device in (A100, RTX):
        for problem in PROBLEMS:
            names = {kernel.name for kernel in best_kernels(problem, 25_088, device)}
            assert not names & only


@pytest.mark.slow
def test_the_best_tiles_are_few_and_of_every_family_that_comes_near() -> None:
    for problem in PROBLEMS:
        tiles = best_kernels(problem, 25_088, H200)
        assert len(tiles) <= MOST_KERNELS
        assert tiles == sorted(tiles, key=lambda kernel: kernel.predicted_us)
        first = [ranked(family, problem, 25_088, H200)[:1] for family in FAMILIES]
        leaders = [best[0] for best in first if best]
        least = min((kernel.predicted_us for kernel in leaders), default=0.0)
        near = {kernel.name for kernel in leaders if kernel.predicted_us <= 3 * least}
        assert {kernel.name for kernel in tiles} == near
        assert best_kernels(problem, 25_088, H200, most=1) == tiles[:1]


@pytest.mark.parametrize("last", [False, True], ids=["batch_first", "batch_last"])
def test_short_sums_of_split_products_are_left_to_pytorch(last: bool) -> None:
    """Three TF32 products are less exact than cuBLAS there; TF32 itself has no such limit."""
    short, long = Pattern(4, 64, 16, 4), Pattern(4, 64, 32, 4)
    for family in FAMILIES:
        if family.splits:
            exact = Problem.of_factor(short, "float32", last)
            assert "less exact than cuBLAS" in str(family.unsupported_reason(exact, H200))
            assert not ranked(family, exact, 1000, H200)
            tf32 = dataclasses.replace(exact, exact=False)
            assert "less exact" not in str(family.unsupported_reason(tf32, H200))
            assert "less exact" not in str(
                family.unsupported_reason(Problem.of_factor(long, "float32", last), H200)
            )


def test_which_families_prepare_weights() -> None:
    d1, d4 = Pattern(4, 64, 64, 1), Pattern(4, 64, 64, 4)
    prepare = {f.name: (f.prepares_weight(d1), f.prepares_weight(d4)) for f in FAMILIES}
    assert prepare["mma16"] == prepare["mma_tf32x3"] == prepare["decode_mma16"] == (False, False)
    assert prepare["batch_last_mma16"] == prepare["transpose_bmm"] == (False, True)
    assert prepare["wgmma_tf32x3"] == (True, True)


def test_one_product_takes_less_time_than_three() -> None:
    for name in ("mma_tf32x3", "wgmma_tf32x3", "batch_last_mma_tf32x3"):
        family = next(family for family in FAMILIES if family.name == name)
        pattern = Pattern(1, 1024, 512, 1)  # bound by products, not by memory
        exact = Problem.of_factor(pattern, "float32", name.startswith("batch_last"))
        tf32 = dataclasses.replace(exact, exact=False)
        slow, fast = (ranked(family, p, 25_088, H200)[0] for p in (exact, tf32))
        assert fast.predicted_us < slow.predicted_us


# The fastest tiles measured on an H200 at batch 25,088 (docs/development), in microseconds.
MEASURED = {
    "(16,64,64,4)": 233,
    "(64,64,64,8)": 2333,
    "(96,48,48,16)": 5493,
    "(1,1024,1024,1)": 453,
    "(4,64,64,16)": 305,
    "(1,768,768,4)": 1271,
    "(16,128,128,4)": 687,
    "(1,384,384,12)": 1627,
    "(2,512,512,16)": 5959,
    "(1,192,192,16)": 448,
    "(1,128,128,96)": 1466,
}


@pytest.mark.parametrize("text", MEASURED)
def test_fp32_predictions_are_near_what_was_measured(text: str) -> None:
    problem = Problem.of_factor(Pattern.parse(text), "float32", False)
    best = best_kernels(problem, 25_088, H200, most=1)[0]
    assert 0.6 < best.predicted_us / MEASURED[text] < 1.6


def test_a_device_without_the_instructions_gets_none() -> None:
    problem = Problem.of_factor(Pattern(4, 64, 64, 16), "float16", False)
    assert not any(ranked(family, problem, 64, T4) for family in FAMILIES)


def test_what_a_family_cannot_compute_has_no_tiles() -> None:
    problem = Problem.of_factor(Pattern(1, 7, 7, 7), "float64", False)
    assert not any(ranked(family, problem, 64, H200) for family in FAMILIES)


@pytest.mark.slow
def test_a_longer_batch_is_predicted_to_take_longer() -> None:
    for problem in PROBLEMS:
        for family in FAMILIES:
            short = ranked(family, problem, 2_000, H200)[:1]
            long = ranked(family, problem, 200_000, H200)[:1]
            for one, other in zip(short, long, strict=True):
                assert one.predicted_us < other.predicted_us


@pytest.mark.slow
def test_more_multiprocessors_are_predicted_to_be_faster() -> None:
    bigger = dataclasses.replace(H200, multiprocessors=264)
    for problem in PROBLEMS:
        for family in FAMILIES:
            small = ranked(family, problem, 25_088, H200)[:1]
            big = ranked(family, problem, 25_088, bigger)[:1]
            for one, other in zip(small, big, strict=True):
                assert other.predicted_us < one.predicted_us


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that are compiled on an H200, which is played."""
    requested: list[str] = []

    class Compiled:
        data = b""

    def compiled(source: str, target: str) -> Compiled:
        requested.append(source)
        return Compiled()

    monkeypatch.setattr(launcher.nvrtc, "cubin", compiled)
    monkeypatch.setattr(launcher.arch, "of_device", lambda _: "sm_90a")
    monkeypatch.setattr(launcher.driver, "load_kernel", lambda *_: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(DeviceSpec, "of_device", classmethod(lambda cls, _: H200))
    return requested


@pytest.mark.sweep
@pytest.mark.parametrize("batch", [16, 25_088])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_a_tile_compiles_can_be_compiled_ahead(requested, dtype, batch_last, exact, batch):
    """Its sources, which a process without the device compiles, are all that its launcher asks."""
    for shape in ((4, 64, 64, 16), (1, 192, 192, 12), (8, 256, 96, 1), (2, 48, 80, 3)):
        problem = Problem.of_factor(Pattern(*shape), dtype, batch_last, exact)
        for kernel in best_kernels(problem, batch, H200):
            requested.clear()
            kernel.build(0)
            assert set(requested) == set(kernel.sources())


@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_takes_unfit_rows_is_built_with_the_way_where_such_rows_are_to_come(
    requested, dtype, batch_last
):
    """So that the ways of a race are compiled side by side, and not each at its first call."""
    problem = Problem.of_factor(Pattern(4, 64, 64, 16), dtype, batch_last)
    tiles = [way for way in registry.candidates(problem, 1001, H200) if not way.is_pytorch]
    # One copies unfit rows, others take any.
    tiles = [way for way in tiles if way.name not in ("transpose_bmm", "expanded_bmm")]
    assert tiles
    for way, call in registry.built(tiles, 0, "unaligned"):
        requested.clear()
        built = way.build(0, "unaligned")
        if way.name.startswith("gather_mma"):  # it needs no fallback
            assert requested == way.sources()
            continue
        assert requested[:-1] == way.sources()
        requested.clear()
        for one in (call, built):
            launchers = [one, getattr(one, "multiply", one)]
            assert [one.fallback for one in launchers if one.make_fallback is not None]
        assert not requested
