"""The request of `ksopt bench models`, parsed from its options and checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from ksopt.bench.models.build import SIZES, Size, size_of
from ksopt.bench.models.chains import NAMED, chain_of
from ksopt.bench.models.options import ModelsOptions
from ksopt.bench.models.results import DENSE, WORDS, Subject
from ksopt.conversion.plan import Plan
from ksopt.errors import InvalidInputError
from ksopt.measure import device as devices
from ksopt.system import limits, option_fields
from ksopt.system.suggest import known_words

DTYPES = ("float32", "bfloat16", "float16")
PASSES = ("forward", "step")
MODES = ("default", "graphs", "recorded")
_GRAPHS = ("graphs", "recorded")
TUNES = ("measure", "model", "off")


@dataclass(frozen=True)
class ModelsRequest:
    """The checked request: everything that decides the measurements. `of` creates it.

    Args:
        options: the source of the request.
        subjects: in the order measured.
        device: torch's name of the device.
        plan: the chain of each replaced layer; used instead of a rule.
        ways: of `ksopt.bench.models.results.IMPLEMENTATIONS`, the dense one first.
        remarks: sentences that name each omission and its reason.
    """

    options: ModelsOptions
    subjects: tuple[Subject, ...]
    device: str
    plan: Plan | None
    ways: tuple[str, ...]
    remarks: tuple[str, ...]

    @classmethod
    def of(cls, options: ModelsOptions) -> ModelsRequest:
        """Check a request as it comes from a command line.

        Raises:
            InvalidInputError: an option is invalid; the sentence names the allowed values.
        """
        device = devices.resolve(options.device)
        models = known_words("--models", options.models, tuple(SIZES))
        dtypes = known_words("--dtypes", options.dtypes, DTYPES)
        passes = known_words("--passes", options.passes, PASSES)
        modes = known_words("--modes", options.modes, MODES)
        ways = known_words("--ways", options.ways, tuple(WORDS))
        for name in ("layers", "batch", "length"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise InvalidInputError(f"--{name} {value}: it must be at least 1")
        if not 0 < options.seconds < 1e6:
            raise InvalidInputError(f"--seconds {options.seconds:g}: it must be above 0")
        if options.tune is not None and options.tune not in TUNES:
            raise InvalidInputError(f"--tune {options.tune}: it must be one of {', '.join(TUNES)}")
        for model in models:
            size = _size(model, options)
            remedy = "give a smaller --batch, --length or --layers"
            limits.check_bytes(size.least_bytes, device, f"model {model} in float64", remedy)
            if options.plan is None:
                sizes = (size.hidden, size.hidden), (size.hidden, size.inner)
                for n_in, n_out in (*sizes, (size.inner, size.hidden)):
                    chain_of(options.chain, n_in, n_out)
        if options.plan is not None and options.chain not in NAMED:
            raise InvalidInputError("--plan takes the place of --chain: give one of them")
        remarks: tuple[str, ...] = ()
        if device.type != "cuda":
            remarks = tuple(
                f"On a CPU there are no CUDA graphs: the mode {mode} is left out."
                for mode in modes
                if mode in _GRAPHS
            )
            if len(remarks) == len(modes):
                raise InvalidInputError(
                    f"--modes {','.join(modes)}: these replay CUDA graphs; the device is {device}"
                )
            remarks = (*remarks, "On a CPU peak memory is not counted: it is left out.")
            modes = tuple(mode for mode in modes if mode not in _GRAPHS)
        return cls(
            options=options,
            subjects=tuple(
                Subject(model, dtype, one, mode)
                for model in models
                for dtype in dtypes
                for one in passes
                for mode in modes
            ),
            device=str(device),
            plan=None if options.plan is None else Plan.read(options.plan),
            ways=(DENSE, *(WORDS[way] for way in ways)),
            remarks=remarks,
        )

    @property
    def command(self) -> str:
        """The command line of this request, without the output folder."""
        return " ".join(["ksopt bench models", *option_fields.words(self.options)])

    def size(self, subject: Subject) -> Size:
        """The sizes of a subject's model."""
        return _size(subject.model, self.options)

    def identity(self) -> dict[str, object]:
        """The values that all runs of a folder share, as JSON values.

        More models, dtypes, passes and modes may follow.
        """
        named = asdict(self.options)
        for name in ("models", "dtypes", "passes", "modes", "device", "seconds"):
            del named[name]
        named["ways"] = sorted(self.ways)
        named["plan"] = None if self.plan is None else self.plan.to_json()
        return named | {"device": torch.device(self.device).type}


def _size(model: str, options: ModelsOptions) -> Size:
    return size_of(model, options.small, options.layers, options.batch, options.length)
