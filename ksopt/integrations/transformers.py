"""Chains in models of transformers, by its quantization interface.

Importing this module registers the method "ksopt": import it before loading a folder with chains.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from ksopt.conversion.apply import Conversion, convert
from ksopt.conversion.empty_chains import insert_empty_chains
from ksopt.conversion.layers import find
from ksopt.conversion.plan import Plan, Rule
from ksopt.conversion.resolve import conditions, resolve
from ksopt.errors import InvalidInputError, UnavailableError

try:
    from transformers import PreTrainedModel
    from transformers.quantizers import HfQuantizer
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise UnavailableError(
        f"KSConfig needs transformers, which cannot be imported ({error}): pip install "
        "'ksopt[transformers]'"
    ) from error

METHOD = "ksopt"
"""The ``quant_method`` of a config.json."""
_SHOWN = 4
"""Names that a warning lists."""


@register_quantization_config(METHOD)
class KSConfig(QuantizationConfigMixin):
    """A plan of conversion as a ``quantization_config`` of transformers.

    A dense checkpoint is loaded and converted as by `ksopt.convert`. ``save_pretrained`` then
    writes the chains and this config, and ``from_pretrained`` of that folder loads them without
    another config. Nothing is quantized: chains have the dtype that the model is loaded in.

    Args:
        plan: A `ksopt.Plan`, a mapping from layers to chains, or the path of a plan.json, such as a
            search writes.
        max_error: Layers whose relative error would be larger stay dense.
        refine: Steps of gradient refinement of chains of three factors or more.
        example_inputs: Inputs of the model, as of `ksopt.convert`. Rules with a condition need
            them. Layers that a condition leaves dense are named in a warning, with the reason. A
            saved config is without inputs: its rules name the layers that became chains.

    Raises:
        InvalidInputError: The plan is malformed.

    Example:
        >>> import tempfile
        >>> from transformers import AutoModel, GPT2Config, GPT2Model
        >>> sizes = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=8)
        >>> dense, folder = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> GPT2Model(sizes).save_pretrained(dense)
        >>> config = KSConfig({"h.*.mlp.c_fc": "(1,32,8,4)*(4,8,8,1)"})
        >>> model = AutoModel.from_pretrained(dense, quantization_config=config)
        >>> print(model.h[0].mlp.c_fc.chain)
        (1,32,8,4)*(4,8,8,1)
        >>> model.save_pretrained(folder)
        >>> print(AutoModel.from_pretrained(folder).h[0].mlp.c_fc.chain)
        (1,32,8,4)*(4,8,8,1)
    """

    def __init__(
        self,
        plan: Plan | Mapping[str, Any] | str | Path,
        max_error: float | None = None,
        refine: int = 0,
        example_inputs: object = None,
        **others: Any,
    ) -> None:
        unknown = sorted(set(others) - {"quant_method"})
        if unknown:
            raise InvalidInputError(
                f"KSConfig has no {unknown[0]!r}: it takes plan, max_error, refine and "
                "example_inputs"
            )
        # transformers writes what the attributes hold as JSON.
        self.quant_method: Any = METHOD
        is_json = isinstance(plan, Mapping) and "schema" in plan
        read = Plan.from_json(json.dumps(plan)) if is_json else Plan.of(plan)
        self.plan = json.loads(read.to_json())
        self.max_error = max_error
        self.refine = refine
        self.example_inputs = example_inputs

    @classmethod
    def of(cls, conversion: Conversion) -> KSConfig:
        """The config of a model that `ksopt.convert` or `ksopt.optimize` has converted.

        Set on the model, it lets ``from_pretrained`` read the folder of ``save_pretrained``.

        Raises:
            InvalidInputError: No layer was converted.

        Example:
            >>> from transformers import GPT2Config, GPT2Model
            >>> model = GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
            >>> done = convert(model, {"h.*.mlp.c_fc": "(1,32,8,4)*(4,8,8,1)"})
            >>> model.config.quantization_config = KSConfig.of(done)
            >>> model.config.quantization_config.to_plan().rules[0].match
            'h.0.mlp.c_fc'
        """
        if not conversion.layers:
            raise InvalidInputError("KSConfig: no layer was converted, so the model is dense")
        rules = [
            Rule(layer.chains, layer.name, layer.in_features, layer.out_features)
            for layer in conversion.layers
        ]
        return cls(Plan(tuple(rules), made_by="ksopt.convert"))

    def to_plan(self) -> Plan:
        """The config's plan."""
        return Plan.from_json(json.dumps(self.plan))

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON values, without the inputs."""
        return deepcopy({k: v for k, v in vars(self).items() if k != "example_inputs"})


@register_quantizer(METHOD)
class KSQuantizer(HfQuantizer):
    """Replaces layers by chains in a model that transformers loads."""

    quantization_config: KSConfig

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **_: Any
    ) -> PreTrainedModel:
        """Insert empty chains for a checkpoint with chains; the model has no values yet."""
        if self.pre_quantized:
            plan = _plan_in(model, self.quantization_config.to_plan())
            if plan is not None:
                choices, _ = resolve(model, plan, (), ())
                insert_empty_chains(model, choices)
                for choice in choices:
                    _leave_initialized(model, choice.place.name)
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **_: Any
    ) -> PreTrainedModel:
        """Convert a dense checkpoint, and record the conversion in the model's config.

        The model is not marked as quantized: its weights are floating-point numbers, and operations
        that transformers refuses for quantized models (training, when compiled) work.
        """
        config: KSConfig | None = self.quantization_config
        assert config is not None
        if not self.pre_quantized:
            plan = config.to_plan()
            done = convert(
                model,
                plan,
                max_error=config.max_error,
                refine=config.refine,
                example_inputs=config.example_inputs,
            )
            _warn_of_conditions(done, plan)
            config = KSConfig.of(done) if done.layers else None
        self.remove_quantization_config(model)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config._is_quantized = False
        if config is not None:
            model.config.quantization_config = config
        return model

    def is_serializable(self) -> bool:
        """True: chains are ordinary tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: chains have gradients."""
        return True


def _warn_of_conditions(done: Conversion, plan: Plan) -> None:
    """Name the layers for which a plan has chains under conditions, and that stayed dense."""
    by_reason: dict[str, list[str]] = {}
    for place in find(done.model)[0]:
        if place.name in done.dense and conditions(plan, place):
            by_reason.setdefault(done.dense[place.name], []).append(place.name)
    for reason, names in by_reason.items():
        more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        stay = "stays" if len(names) == 1 else "stay"
        which = ", ".join([*names[:_SHOWN], *more])
        warnings.warn(f"ksopt: {which} {stay} dense: {reason}.", stacklevel=2)


def _leave_initialized(model: PreTrainedModel, name: str) -> None:
    """Prevent transformers from initializing the weights of a layer that became a chain.

    It initializes weights that a checkpoint lacks. Some models do so from the module around a
    layer, by the layer's ``weight``, lacking or not. Inner modules are still initialized.
    """
    path, _, _ = name.rpartition(".")
    module: Any = model.get_submodule(path)
    module._is_hf_initialized = True
    while path and not isinstance(module, PreTrainedModel):
        module._is_hf_initialized = True
        path, _, _ = path.rpartition(".")
        module = model.get_submodule(path)


def _plan_in(model: PreTrainedModel, plan: Plan) -> Plan | None:
    """A checkpoint's plan in the model's own names; None if the model has none of its layers.

    A model with a head calls a layer ``transformer.h.0.mlp``, the model without it ``h.0.mlp``.
    """
    layers = [(place.name, place.in_features, place.out_features) for place in find(model)[0]]
    prefix = f"{model.base_model_prefix}."
    rules = []
    for rule in plan.rules:
        for match in (rule.match, prefix + rule.match, rule.match.removeprefix(prefix)):
            own = replace(rule, match=match)
            if any(own.matches(*layer) for layer in layers):
                rules.append(own)
                break
    return replace(plan, rules=tuple(rules)) if rules else None
