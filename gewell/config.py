"""What a model folder's `config.json` says, resolved once. No torch.

Accepts every public form of the Gemma 3 text and Gemma 4 families: nested (`text_config`) and flat files, one attention
geometry per layer (`per_layer_config`) and the older `global_head_dim` pair, rotary settings of old and new files, the
drafters ("assistant" models). Whatever is left out of a file takes the family's published default.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from gewell.errors import CheckpointError, ConfigError


class LayerKind(StrEnum):
    SLIDING = "sliding"
    FULL = "full"


class Family(StrEnum):
    GEMMA3 = "gemma3"
    GEMMA4 = "gemma4"
    GEMMA4_DRAFTER = "gemma4_drafter"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One decoder layer with all defaults resolved: what attention reads, and how wide the MLP is."""

    layer_idx: int
    kind: LayerKind
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    num_live_pairs: int  # rotary pairs (i, i + head_dim/2), i < num_live_pairs, turn; the others pass unchanged
    rope_factor: float  # linear position scaling; 1.0: none
    sliding_window: int | None  # keys a query sees, itself included; None in full layers
    k_eq_v: bool  # no v_proj: v is k before its norm
    kv_layer_idx: int | None  # layer whose keys and values this one reads; None: the target's (drafters)

    @property
    def writes_kv(self) -> bool:
        return self.kv_layer_idx == self.layer_idx


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputConfig:
    """Per-layer embeddings (E2B, E4B): a second embedding table gives every layer an input of its own."""

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    backbone_hidden_size: int
    num_centroids: int | None  # None: an ordinary output head
    num_centroids_used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    patch_size: int
    pooling_size: int  # patches per side of one soft token
    position_table_size: int
    rope_theta: float
    rms_norm_eps: float
    is_standardized: bool
    has_clipped_linears: bool
    default_soft_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    pad: int = 0
    bos: int | None = 2
    eos: tuple[int, ...] = (1,)
    suppressed: tuple[int, ...] = ()  # never to be generated
    image: int | None = None
    boi: int | None = None
    eoi: int | None = None
    video: int | None = None
    audio: int | None = None

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Ids that stand for something else than a word: where nothing is put in their place, they read as padding."""
        return tuple(i for i in (self.image, self.video, self.audio) if i is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The publisher's advice in `generation_config.json`; None where it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    family: Family
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    sliding_window: int  # tokens, counting the query itself
    rms_norm_eps: float
    final_logit_softcap: float | None
    q_scale: float  # multiplies the normed query; the attention op's own scale is 1
    dtype: str  # of the published weights
    layers: tuple[LayerConfig, ...]
    moe: MoEConfig | None = None
    per_layer_input: PerLayerInputConfig | None = None
    vision: VisionConfig | None = None
    drafter: DrafterConfig | None = None
    quantization: str | None = None  # method named by the file; None: plain weights
    has_bidirectional_images: bool = False  # image tokens of one run see each other, in sliding layers
    tokens: SpecialTokens = field(default_factory=SpecialTokens)
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def norm_adds_one(self) -> bool:
        """Stored norm weights are the scale minus one."""
        return self.family is Family.GEMMA3

    @property
    def has_v_norm(self) -> bool:
        return self.family is not Family.GEMMA3

    @property
    def has_layer_scalar(self) -> bool:
        return self.family is not Family.GEMMA3

    def layers_of(self, kind: LayerKind) -> tuple[LayerConfig, ...]:
        """Layers of this kind that write keys and values, in order: the ones a page holds."""
        return tuple(layer for layer in self.layers if layer.kind is kind and layer.writes_kv)

    @classmethod
    def from_dir(cls, model_dir: Path) -> Self:
        """Read `config.json` and, if there is one, `generation_config.json`.

        Raises CheckpointError when a file is missing or not JSON, ConfigError for a value that cannot be used.
        """
        config = _read_json(model_dir / "config.json")
        generation = model_dir / "generation_config.json"
        return cls.from_dict(config, _read_json(generation) if generation.is_file() else {})

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a `config.json` alone, whatever its name: the model's shape. Raises as `from_dir` does."""
        return cls.from_dict(_read_json(path))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> Self:
        outer = _Fields(config, "config.json")
        family = _family(outer)
        text = outer.section("text_config") or outer
        _refuse_unsupported(text, family)
        layers = _layers(text, family)
        hidden_size = text.size("hidden_size", 2304)
        vocab_size = text.size("vocab_size", 262208 if family is Family.GEMMA3 else 262144)
        query_scalar = text.positive("query_pre_attn_scalar", 256.0) if family is Family.GEMMA3 else 1.0
        vision = outer.section("vision_config") if family is Family.GEMMA4 else None
        soft_tokens = outer.size("vision_soft_tokens_per_image", 280)
        return cls(
            family=family,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            max_position_embeddings=text.size("max_position_embeddings", 131072),
            sliding_window=_sliding_window(text, family),
            rms_norm_eps=text.positive("rms_norm_eps", 1e-6),
            final_logit_softcap=text.optional_positive("final_logit_softcapping"),
            q_scale=query_scalar**-0.5,
            dtype=outer.text("dtype") or outer.text("torch_dtype") or text.text("dtype") or "bfloat16",
            layers=layers,
            moe=_moe(text),
            per_layer_input=_per_layer_input(text, family, vocab_size),
            vision=_vision(vision, soft_tokens) if vision else None,
            drafter=_drafter(outer) if family is Family.GEMMA4_DRAFTER else None,
            quantization=_quantization(outer),
            has_bidirectional_images=text.text("use_bidirectional_attention") == "vision",
            tokens=_tokens(outer, text, _Fields(generation or {}, "generation_config.json")),
            sampling=_sampling(_Fields(generation or {}, "generation_config.json")),
        )


# --- reading single values ---------------------------------------------------------------------------------------


class _Fields:
    """A JSON object whose values are checked as they are taken; null and absent are the same."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values = values
        self._path = path

    def error(self, name: str, limit: str) -> ConfigError:
        return ConfigError(f"{self._path}: {name}", self._values.get(name), limit)

    @property
    def names(self) -> list[str]:
        """Fields that are given and not null."""
        return [name for name, value in self._values.items() if value is not None]

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def section(self, name: str) -> "_Fields | None":
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, "must be an object")
        return _Fields(value, f"{self._path}: {name}")

    def overlay(self, values: Mapping[str, Any], path: str) -> "_Fields":
        return _Fields({**self._values, **values}, f"{self._path}: {path}")

    def integer(self, name: str, default: int, least: int = 0) -> int:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"must be an integer of at least {least}")
        return value

    def size(self, name: str, default: int) -> int:
        return self.integer(name, default, least=1)

    def positive(self, name: str, default: float) -> float:
        value = self.optional_positive(name)
        return default if value is None else value

    def optional_positive(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(name, "must be a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        return value if isinstance(value, str) else None

    def token(self, name: str) -> int | None:
        return None if self._values.get(name) is None else self.integer(name, 0)

    def tokens(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them; () when not given."""
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.error(name, "must be a token id or a list of token ids")
        return tuple(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is not a model folder: it has no {path.name}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise CheckpointError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__} where an object is expected")
    return value


# --- the parts of a config ---------------------------------------------------------------------------------------

_FAMILIES = {
    "gemma3_text": Family.GEMMA3,
    "gemma3": Family.GEMMA3,
    "gemma4_text": Family.GEMMA4,
    "gemma4": Family.GEMMA4,
    "gemma4_assistant": Family.GEMMA4_DRAFTER,
}


def _family(outer: _Fields) -> Family:
    model_type = outer.text("model_type") or ""
    if model_type.startswith("gemma4_unified"):
        raise outer.error("model_type", "the 12B unified models feed image patches without an encoder: not supported")
    if model_type not in _FAMILIES:
        raise outer.error("model_type", f"must be one of {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[model_type]


def _refuse_unsupported(text: _Fields, family: Family) -> None:
    """Settings that would change the arithmetic and that no published model of the family uses."""
    if text.flag("attention_bias"):
        raise text.error("attention_bias", "biases in attention are not supported")
    if text.get("attn_logit_softcapping") is not None:
        raise text.error("attn_logit_softcapping", "must be null: capped attention scores are not supported")
    if text.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise text.error("hidden_activation", "must be gelu_pytorch_tanh")
    if text.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise text.error("use_bidirectional_attention", 'must be null or "vision": encoders are not supported')
    if text.get("tie_word_embeddings") is False:
        raise text.error("tie_word_embeddings", "must be true: the output head is the embedding table")
    if family is Family.GEMMA3 and text.get("num_kv_shared_layers"):
        raise text.error("num_kv_shared_layers", "must be 0 in Gemma 3")


_MAX_LAYERS = 1000  # ten times the deepest published model: a damaged file must not fill the memory


def _layer_kinds(text: _Fields, family: Family) -> tuple[LayerKind, ...]:
    num_layers = text.size("num_hidden_layers", 26 if family is Family.GEMMA3 else 30)
    if num_layers > _MAX_LAYERS:
        raise text.error("num_hidden_layers", f"must not be above {_MAX_LAYERS}")
    names = text.get("layer_types")
    if names is None:
        pattern = text.size("sliding_window_pattern", text.size("_sliding_window_pattern", 6))
        kinds = [LayerKind.SLIDING if (i + 1) % pattern else LayerKind.FULL for i in range(num_layers)]
    else:
        known = {"sliding_attention": LayerKind.SLIDING, "full_attention": LayerKind.FULL}
        if not isinstance(names, list) or len(names) != num_layers or not all(str(name) in known for name in names):
            raise text.error("layer_types", f"must list {num_layers} times sliding_attention or full_attention")
        kinds = [known[str(name)] for name in names]
    if family is not Family.GEMMA3:
        kinds[-1] = LayerKind.FULL  # the published code forces it, whatever the file says
    return tuple(kinds)


@dataclass(frozen=True, slots=True)
class _Rope:
    theta: float
    live_fraction: float
    factor: float


def _rope(text: _Fields, kind: LayerKind, family: Family) -> _Rope:
    """Rotary settings of one kind: `rope_parameters` by kind in new files, single fields in old Gemma 3 files."""
    is_gemma4 = family is not Family.GEMMA3
    theta = 1e6 if kind is LayerKind.FULL else 1e4
    parameters = text.section("rope_parameters")
    if parameters is not None:
        values = parameters.section(f"{kind}_attention") or _Fields({}, "rope_parameters")
    elif is_gemma4:
        values = _Fields({}, "rope_parameters")
    elif kind is LayerKind.FULL:
        theta = text.positive("rope_theta", theta)
        values = text.section("rope_scaling") or _Fields({}, "rope_scaling")
    else:
        theta = text.positive("rope_local_base_freq", theta)
        values = _Fields({}, "rope_scaling")
    proportional = is_gemma4 and kind is LayerKind.FULL
    rope_type = values.text("rope_type") or values.text("type") or ("proportional" if proportional else "default")
    if rope_type not in ("default", "linear", "proportional"):
        raise values.error("rope_type", "must be default, linear or proportional")
    fraction = 1.0
    if rope_type == "proportional":
        # A file that spells the type out and leaves the factor out turns every pair.
        fraction = values.positive("partial_rotary_factor", 1.0 if values.text("rope_type") else 0.25)
        if fraction > 1:
            raise values.error("partial_rotary_factor", "must not be above 1")
    factor = values.positive("factor", 1.0) if rope_type != "default" else 1.0
    return _Rope(values.positive("rope_theta", theta), fraction, factor)


def _layers(text: _Fields, family: Family) -> tuple[LayerConfig, ...]:
    kinds = _layer_kinds(text, family)
    num_shared = text.integer("num_kv_shared_layers", 0)
    if num_shared > len(kinds):
        raise text.error("num_kv_shared_layers", f"must not be above the {len(kinds)} layers")
    if (num_shared == len(kinds)) != (family is Family.GEMMA4_DRAFTER):
        raise text.error("num_kv_shared_layers", "all layers share in a drafter, and only in a drafter")
    first_shared = len(kinds) - num_shared
    ropes = {kind: _rope(text, kind, family) for kind in LayerKind}
    layers: list[LayerConfig] = []
    for layer_idx, kind in enumerate(kinds):
        own = text.overlay(*_layer_overrides(text, layer_idx, kind, family))
        is_shared = layer_idx >= first_shared
        head_dim = own.size("head_dim", 256)
        num_q_heads, num_kv_heads = own.size("num_attention_heads", 8), own.size("num_key_value_heads", 4)
        if head_dim % 2:
            raise own.error("head_dim", "must be even: rotary pairs (i, i + head_dim/2)")
        if num_q_heads % num_kv_heads:
            raise own.error("num_attention_heads", f"must be a multiple of the {num_kv_heads} key-value heads")
        double = is_shared and text.flag("use_double_wide_mlp")
        rope = ropes[kind]
        layers.append(
            LayerConfig(
                layer_idx=layer_idx,
                kind=kind,
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                intermediate_size=own.size("intermediate_size", 9216) * (2 if double else 1),
                rope_theta=rope.theta,
                num_live_pairs=int(rope.live_fraction * head_dim // 2),
                rope_factor=rope.factor,
                sliding_window=_sliding_window(text, family) if kind is LayerKind.SLIDING else None,
                k_eq_v=kind is LayerKind.FULL and text.flag("attention_k_eq_v"),
                kv_layer_idx=_kv_source(text, kinds, first_shared, kind) if is_shared else layer_idx,
            )
        )
    return tuple(layers)


def _layer_overrides(text: _Fields, layer_idx: int, kind: LayerKind, family: Family) -> tuple[Mapping[str, Any], str]:
    """What this layer's geometry replaces: an entry of `per_layer_config`, else the older pair of global fields."""
    per_layer = text.section("per_layer_config")
    if per_layer is not None:
        values = per_layer.section(str(layer_idx)) or _Fields({}, "")
        for name in values.names:
            if name not in _PER_LAYER and values.get(name) != text.get(name):
                raise values.error(name, f"layers may differ in {', '.join(_PER_LAYER)} alone")
        return {name: values.get(name) for name in values.names}, f"per_layer_config.{layer_idx}"
    if family is Family.GEMMA3 or kind is LayerKind.SLIDING:
        return {}, f"layer {layer_idx}"
    overrides: dict[str, Any] = {"head_dim": text.size("global_head_dim", 512)}
    # The field is present in files without k_eq_v too; it counts only where that is on.
    if text.flag("attention_k_eq_v") and text.get("num_global_key_value_heads") is not None:
        overrides["num_key_value_heads"] = text.size("num_global_key_value_heads", 1)
    return overrides, f"layer {layer_idx}"


_PER_LAYER = ("head_dim", "num_key_value_heads", "num_attention_heads", "intermediate_size")


def _sliding_window(text: _Fields, family: Family) -> int:
    return text.integer("sliding_window", 4096 if family is Family.GEMMA3 else 512, least=2)


def _kv_source(text: _Fields, kinds: tuple[LayerKind, ...], first_shared: int, kind: LayerKind) -> int | None:
    if first_shared == 0:
        return None
    sources = [i for i in range(first_shared) if kinds[i] is kind]
    if not sources:
        raise text.error("num_kv_shared_layers", f"leaves no {kind} layer with keys and values of its own")
    return sources[-1]


def _moe(text: _Fields) -> MoEConfig | None:
    if not text.flag("enable_moe_block"):
        return None
    moe = MoEConfig(
        num_experts=text.size("num_experts", 128),
        num_experts_per_token=text.size("top_k_experts", 8),
        intermediate_size=text.size("moe_intermediate_size", 704),
    )
    if moe.num_experts_per_token > moe.num_experts:
        raise text.error("top_k_experts", f"must not be above the {moe.num_experts} experts")
    return moe


def _per_layer_input(text: _Fields, family: Family, vocab_size: int) -> PerLayerInputConfig | None:
    size = text.integer("hidden_size_per_layer_input", 256) if family is Family.GEMMA4 else 0
    if not size:
        return None
    return PerLayerInputConfig(size=size, vocab_size=text.size("vocab_size_per_layer_input", vocab_size))


def _drafter(outer: _Fields) -> DrafterConfig:
    if outer.get("backbone_hidden_size") is None:
        raise outer.error("backbone_hidden_size", "a drafter must say its target's hidden size")
    ordered = outer.flag("use_ordered_embeddings")
    return DrafterConfig(
        backbone_hidden_size=outer.size("backbone_hidden_size", 1),
        num_centroids=outer.size("num_centroids", 2048) if ordered else None,
        num_centroids_used=outer.size("centroid_intermediate_top_k", 32),
    )


def _vision(vision: _Fields, soft_tokens: int) -> VisionConfig:
    rope = vision.section("rope_parameters") or _Fields({}, "rope_parameters")
    return VisionConfig(
        hidden_size=vision.size("hidden_size", 768),
        num_layers=vision.size("num_hidden_layers", 16),
        num_heads=vision.size("num_attention_heads", 12),
        head_dim=vision.size("head_dim", 64),
        intermediate_size=vision.size("intermediate_size", 3072),
        patch_size=vision.size("patch_size", 16),
        pooling_size=vision.size("pooling_kernel_size", 3),
        position_table_size=vision.size("position_embedding_size", 10240),
        rope_theta=rope.positive("rope_theta", 100.0),
        rms_norm_eps=vision.positive("rms_norm_eps", 1e-6),
        is_standardized=vision.flag("standardize"),
        has_clipped_linears=vision.flag("use_clipped_linears"),
        default_soft_tokens=vision.size("default_output_length", soft_tokens),
    )


def _quantization(outer: _Fields) -> str | None:
    section = outer.section("quantization_config")
    return None if section is None else section.text("quant_method") or "of an unnamed method"


def _tokens(outer: _Fields, text: _Fields, generation: _Fields) -> SpecialTokens:
    bos = text.token("bos_token_id")
    return SpecialTokens(
        pad=text.integer("pad_token_id", 0),
        bos=2 if bos is None else bos,
        eos=generation.tokens("eos_token_id") or outer.tokens("eos_token_id") or text.tokens("eos_token_id") or (1,),
        suppressed=generation.tokens("suppress_tokens"),
        image=outer.token("image_token_id"),
        boi=outer.token("boi_token_id"),
        eoi=outer.token("eoi_token_id"),
        video=outer.token("video_token_id"),
        audio=outer.token("audio_token_id"),
    )


def _sampling(generation: _Fields) -> SamplingDefaults:
    return SamplingDefaults(
        temperature=generation.optional_positive("temperature"),
        top_k=generation.integer("top_k", 0) or None,
        top_p=generation.optional_positive("top_p"),
    )
