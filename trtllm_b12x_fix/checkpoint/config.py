"""What a checkpoint's config says about routing and activation; shapes come from tensors."""

from __future__ import annotations

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.claims import Claims, brief
from trtllm_b12x_fix.checkpoint.findings import Finding, Severity
from trtllm_b12x_fix.checkpoint.layers import LayerEntry
from trtllm_b12x_fix.checkpoint.router import Renormalize, RouterSpec, Scoring
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.layer import Activation

#: Activation names of configs; anything else is not emulated.
_ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU, "relu2": Activation.RELU2}


class ModelConfig(Claims):
    """What a ``config.json`` says of activation and routing."""

    def activation(self, entry: LayerEntry) -> Activation:
        """The layer's activation: gated layers are SwiGLU, others relu2.

        Raises:
            InputError: the config names one that is not emulated, or contradicts the tensors.
        """
        name = self.first(conventions.ACTIVATION_KEYS)
        if name is None:
            return Activation.SILU if entry.is_gated else Activation.RELU2
        activation = _ACTIVATIONS.get(str(name).lower())
        if activation is None:
            raise InputError(
                f"config.json: activation {brief(name)} is not emulated; b12x serves silu and "
                "relu2 here"
            )
        if changed := self._changed_swiglu(entry):
            raise InputError(
                f"config.json: {changed}: a SwiGLU of this model's own, which is not emulated; "
                "--activations silu checks the layer without it"
            )
        if activation.is_gated != entry.is_gated:
            raise InputError(
                f"config.json says {name}, but {entry.prefix} has "
                f"{'a' if entry.is_gated else 'no'} gate projection"
            )
        return activation

    def _changed_swiglu(self, entry: LayerEntry) -> str:
        """The config key that makes this gated layer's SwiGLU another function, or nothing."""
        if not entry.is_gated:
            return ""
        present = (key for key in conventions.SWIGLU_KEYS if self.get(key) is not None)
        return next((f"{key} {brief(self._values[key])}" for key in present), "")

    def activation_name(self, entry: LayerEntry) -> str:
        """The layer's activation in words, for lists: one that cannot be checked says so."""
        try:
            return self.activation(entry).value
        except InputError:
            return f"{brief(self.first(conventions.ACTIVATION_KEYS))} (cannot be checked)"

    @property
    def names_a_model(self) -> bool:
        """Whether it says what model this is; without that, its router's rules are not known."""
        return self.get("model_type") is not None

    @property
    def is_latent(self) -> bool:
        """Whether experts work at a smaller size than the model."""
        return self.get(conventions.LATENT_KEY) is not None

    def _rule(self) -> conventions.RoutingRule | None:
        model = self.get("model_type")
        return conventions.ROUTING.get(model) if isinstance(model, str) else None

    def unknown_routing(self) -> str:
        """Why the router that this config describes is not emulated, empty where it is.

        Raises:
            InputError: a value that makes no sense.
        """
        rule, model = self._rule(), brief(self.get("model_type"))
        if self.names_a_model and rule is None:
            return f"the routing of {model} is not emulated"
        method = self.get("topk_method")
        if method is not None and method not in conventions.KNOWN_TOPK_METHODS:
            return "config.json names a topk_method that is not emulated"
        for key in conventions.UNREAD_ROUTING_KEYS:
            if self.get(key) is not None:
                return f"config.json has {key}, which is not emulated"
        if rule is None:
            return ""
        scoring = self._scoring()
        if scoring is not None and (scoring is Scoring.SIGMOID) != rule.sigmoid:
            return f"config.json says scoring_func {scoring.value}, {model} has another"
        limits = (self.integer("n_group", 1), self.integer("topk_group", 1), self._scaling(1.0))
        if rule.groups is None and limits != (1, 1, 1.0):
            return f"config.json limits or scales experts, which {model} does not"
        return ""

    def takes_correction_bias(self) -> bool:
        """Whether the router may have an ``e_score_correction_bias``."""
        rule = self._rule()
        return rule is not None and rule.sigmoid

    def router_spec(self, top_k: int) -> RouterSpec:
        """How the router scores and limits; the model's own rules hold where the config is silent.

        Raises:
            InputError: a value that makes no sense, or a model whose rules are not known.
        """
        rule = self._rule()
        if rule is None:
            raise InputError("config.json: no model whose routing is emulated")
        renormalize = self.get("norm_topk_prob")
        if renormalize is not None and not isinstance(renormalize, bool):
            raise InputError(
                f"config.json: norm_topk_prob must be true or false: {brief(renormalize)}"
            )
        default = rule.renormalize is not False
        if renormalize is None or rule.renormalize is None:
            renormalize = default
        groups, top_groups = rule.groups or (1, 1)
        return RouterSpec(
            top_k=top_k,
            scoring=Scoring.SIGMOID if rule.sigmoid else Scoring.SOFTMAX,
            renormalize=Renormalize.YES if renormalize else Renormalize.NO,
            groups=self.integer("n_group", groups),
            top_groups=self.integer("topk_group", top_groups),
            scaling=self._scaling(rule.scaling),
        )

    def _scaling(self, default: float) -> float:
        scaling = self.get("routed_scaling_factor")
        if scaling is None:
            return default
        number = isinstance(scaling, (int, float)) and not isinstance(scaling, bool)
        # JSON as Python reads it has NaN, Infinity and integers beyond any float.
        if not number or not 0 < scaling < 2**64:
            raise InputError(
                f"config.json: routed_scaling_factor must be a positive number, got "
                f"{brief(scaling)}"
            )
        return float(scaling)

    def _scoring(self) -> Scoring | None:
        named = self.get("scoring_func")
        if named is None:
            return None
        try:
            return Scoring(named)
        except ValueError as error:
            raise InputError(
                f"config.json: scoring_func {brief(named)} is not known; --experts A-B checks "
                "a sample of experts with random routing"
            ) from error

    def contradictions(self, entry: LayerEntry) -> list[Finding]:
        """Where the config says other sizes than the tensors have."""
        findings = []
        if changed := self._changed_swiglu(entry):
            findings.append(
                Finding(
                    Severity.NOTE,
                    "swiglu-not-emulated",
                    f"has {changed}, which changes the activation; the check leaves it out, as "
                    "asked with --activations",
                    file="config.json",
                    layer=entry.prefix,
                )
            )
        findings += [
            _contradiction(what, claimed, actual, entry)
            for what, claimed, actual in self.sizes_otherwise(entry)
            if isinstance(claimed, int)
        ]
        return findings


def _contradiction(what: str, claimed: int, actual: int, entry: LayerEntry) -> Finding:
    if what == "experts" and claimed > actual:
        return Finding(
            Severity.DAMAGE,
            "experts-missing",
            f"says experts {brief(claimed)}, {entry.prefix} has {actual}: the rest is missing "
            "from the files",
            file="config.json",
            layer=entry.prefix,
        )
    latent = " (a latent MoE works at a smaller size)" if what == "hidden size" else ""
    return Finding(
        Severity.NOTE,
        "config-contradicts-tensors",
        f"says {what} {brief(claimed)}, the experts' tensors have {actual}; the tensors "
        f"count{latent}",
        file="config.json",
        layer=entry.prefix,
    )
