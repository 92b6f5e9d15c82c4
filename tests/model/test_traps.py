"""Each known way to get a Gemma wrong, made on purpose: the fixture named for it has to notice.

A golden test that stays green with broken arithmetic protects nobody. `caught_by` is the comparison that must fail;
where the trap is invisible in the logits (`is_hidden`), that is asserted too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gewell_kernels.cpu.gelu_mul
import gewell_kernels.cpu.moe_experts
import gewell_kernels.cpu.write_kv
import pytest
import torch
import torch.nn.functional as F
from gewell_kernels import ops
from gewell_kernels.layout import KVLayout

from gewell.config import LayerKind
from gewell.engine import paged_batch, replay, verify, verify_drafter
from gewell.model import drafter as drafter_module
from gewell.model.drafter import Drafter
from gewell.model.gemma import GemmaModel, MoE, Router
from gewell.model.vision import VisionTower
from tests.model.golden_folders import FIXTURES

Break = Callable[[Any, pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    name: str
    fixture: str
    breaks: Break  # gets the loaded model (tower, drafter) and may change it, or patch the code
    part: str = "model"  # model | vision | drafter
    caught_by: str = "logits"
    is_hidden: bool = False  # the logits do not show it


# --- norms, scales, heads ----------------------------------------------------------------------------------------


def _norms(model: GemmaModel) -> list[torch.Tensor]:
    norms = [model.final_norm]
    for layer in model.layers:
        norms += [layer.input_norm, layer.post_attention_norm, layer.pre_feedforward_norm, layer.post_feedforward_norm]
        norms += [layer.attention.q_norm, layer.attention.k_norm]
    return norms


def _add_to_norms(amount: float) -> Break:
    def breaks(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
        for weight in _norms(model):
            weight += amount

    return breaks


def _scale_queries(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    for layer in model.layers:
        layer.attention.q_scale = layer.attention.layer_kv.head_dim**-0.5


def _no_query_scale(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    for layer in model.layers:
        layer.attention.q_scale = 1.0


def _no_v_norm(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    for layer in model.layers:
        layer.attention.has_v_norm = False


def _with_planes(change: Callable[[torch.Tensor, torch.Tensor, Any], None]) -> Break:
    """After each write of a plain full layer, `change(k plane, v plane, k_weight)` what lies in the pages."""

    def breaks(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
        original = ops.write_kv

        def write_kv(qkv, num_q_heads, q_weight, k_weight, eps, q_scale, has_v_norm, pages, layer, batch):
            result = original(qkv, num_q_heads, q_weight, k_weight, eps, q_scale, has_v_norm, pages, layer, batch)
            if layer.layout is KVLayout.PLAIN and batch.sliding_window is None:
                shape = (2, layer.num_kv_heads, layer.page_tokens, layer.head_dim)
                planes = pages.narrow(1, layer.layer_offset, layer.layer_elems).unflatten(1, shape)
                change(planes[:, 0], planes[:, 1], k_weight)
            return result

        patch.setattr(ops, "write_kv", write_kv)

    return breaks


def _rotary(**changes: Any) -> Break:
    """Plan the full layers with other rotary settings."""

    def breaks(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
        original = verify.plan_kv

        def plan_kv(config, **options):
            plan = original(config, **options)
            layers = [
                replace(layer_kv, **{name: change(layer_kv) for name, change in changes.items()})
                if config.layers[i].kind is LayerKind.FULL
                else layer_kv
                for i, layer_kv in enumerate(plan.layers)
            ]
            return replace(plan, layers=tuple(layers))

        patch.setattr(verify, "plan_kv", plan_kv)

    return breaks


def _turn_the_first_dims(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    """Pairs (i, i + 64) of the first 128 dims, instead of (i, i + 256)."""
    original = gewell_kernels.cpu.write_kv.rotate

    def rotate(x, cos, sin):
        num_turning = 2 * cos.shape[-1]
        if num_turning == x.shape[-1]:
            return original(x, cos, sin)
        return torch.cat((original(x[..., :num_turning], cos, sin), x[..., num_turning:]), dim=-1)

    patch.setattr(gewell_kernels.cpu.write_kv, "rotate", rotate)


def _window(difference: int) -> Break:
    def breaks(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
        def forward_batch(rows, geometry, device, **images):
            batch = paged_batch.forward_batch(rows, geometry, device, **images)
            if batch.sliding.num_decode_seqs:  # pages before the window are gone: reading them is an error of its own
                return batch
            window = batch.sliding.sliding_window + difference
            return replace(batch, sliding=replace(batch.sliding, sliding_window=window))

        patch.setattr(replay, "forward_batch", forward_batch)

    return breaks


# --- the stream and the head -------------------------------------------------------------------------------------


def _no_layer_scalar(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in model.layers:
        layer.scalar = 1.0


def _scalar_on_the_branch(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    for layer in model.layers:
        layer.post_feedforward_norm *= layer.scalar
        layer.scalar = 1.0


def _no_soft_cap(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    model.config = replace(model.config, final_logit_softcap=None)


def _no_embedding_scale(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    model.embedding_scale = 1.0


def _placeholders_are_words(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    model.input_rows = None


def _activation(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Break:
    def breaks(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
        def gelu_mul(gate_up):
            return change(*gate_up.chunk(2, dim=-1))

        patch.setattr(gewell_kernels.cpu.gelu_mul, "gelu_mul", gelu_mul)
        patch.setattr(gewell_kernels.cpu.moe_experts, "gelu_mul", gelu_mul)

    return breaks


def _swapped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(up, approximate="tanh") * gate


# --- experts -----------------------------------------------------------------------------------------------------


def _routers(model: GemmaModel) -> list[Router]:
    return [layer.feedforward.router for layer in model.layers if isinstance(layer.feedforward, MoE)]


def _router_reads_the_normed_stream(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    original = MoE.__call__
    patch.setattr(MoE, "__call__", lambda self, normed, residual, *rest: original(self, normed, normed, *rest))


def _no_router_scale(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    for router in _routers(model):
        router.scale.fill_(1.0)


def _no_router_factor(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    for router in _routers(model):
        router.input_factor = 1.0


def _no_per_expert_scale(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    for router in _routers(model):
        router.per_expert_scale.fill_(1.0)


def _shares_not_renormalised(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    def route(self, residual):
        z = ops.rms_norm(residual, self.scale * self.input_factor, self.eps)
        weights, experts = torch.softmax(self.proj(z).float(), dim=-1).topk(self.num_experts_per_token, dim=-1)
        return experts, weights * self.per_expert_scale[experts]

    patch.setattr(Router, "__call__", route)


# --- small models ------------------------------------------------------------------------------------------------


def _words_alone(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    assert model.layer_inputs is not None
    model.layer_inputs.projection_scale = 0.0


def _own_keys_for_sharing_layers(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    """Sharing layers read the first layer of their kind's neighbour: here sliding layers swap their source's norm."""
    model.layers[2].attention.k_norm = torch.ones_like(model.layers[2].attention.k_norm)
    model.layers[0].attention.k_norm = model.layers[2].attention.k_norm


# --- images ------------------------------------------------------------------------------------------------------


def _image_rows_scaled(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
    original = GemmaModel.embed

    def embed(self, ids, batch):
        if batch.image_embeds is not None:
            batch = replace(batch, image_embeds=batch.image_embeds * self.embedding_scale)
        return original(self, ids, batch)

    patch.setattr(GemmaModel, "embed", embed)


def _pixels_from_zero_to_one(tower: VisionTower, patch: pytest.MonkeyPatch) -> None:
    original = VisionTower.__call__
    patch.setattr(VisionTower, "__call__", lambda self, p, places, *rest: original(self, (p + 1) / 2, places, *rest))


def _standardised_in_bf16(tower: VisionTower, patch: pytest.MonkeyPatch) -> None:
    original = VisionTower._pool

    def pool(self, hidden, positions):
        bias, scale = self.std_bias, self.std_scale
        self.std_bias, self.std_scale = torch.zeros_like(bias), torch.ones_like(scale)
        pooled = original(self, hidden, positions).bfloat16()
        self.std_bias, self.std_scale = bias, scale
        return ((pooled - bias.bfloat16()) * scale.bfloat16()).float()

    patch.setattr(VisionTower, "_pool", pool)


def _x_and_y_swapped(tower: VisionTower, patch: pytest.MonkeyPatch) -> None:
    original = VisionTower._rotary
    patch.setattr(VisionTower, "_rotary", lambda self, positions: original(self, positions.flip(-1)))


def _images_seen(where: str) -> Break:
    def breaks(model: GemmaModel, patch: pytest.MonkeyPatch) -> None:
        def forward_batch(rows, geometry, device, **images):
            batch = paged_batch.forward_batch(rows, geometry, device, **images)
            if where == "nowhere":
                return replace(batch, sliding=replace(batch.sliding, visible_end=None))
            return replace(batch, full=replace(batch.full, visible_end=batch.sliding.visible_end))

        patch.setattr(replay, "forward_batch", forward_batch)

    return breaks


# --- drafters ----------------------------------------------------------------------------------------------------


def _state_before_the_word(drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    first, second = drafter.pre_projection.weight.chunk(2, dim=1)
    drafter.pre_projection.weight = torch.cat((second, first), dim=1)


def _state_before_the_final_norm(drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    original = verify_drafter._advance

    def advance(replay_, track, num_tokens):
        return original(replay_, track, num_tokens) / drafter.target.final_norm

    patch.setattr(verify_drafter, "_advance", advance)


def _draft_batches(change: Callable[[Any, int], Any]) -> Break:
    """`change(batch, number of this draft step)`; each kind of layer gets its own."""

    def breaks(drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
        steps = iter(range(1000))

        def draft_batch(*arguments):
            return change(paged_batch.draft_batch(*arguments), next(steps))

        patch.setattr(verify_drafter, "draft_batch", draft_batch)

    return breaks


def _moved(batch: Any, distance: int) -> Any:
    sliding, full = (replace(b, positions=b.positions + distance) for b in (batch.sliding, batch.full))
    return replace(batch, sliding=sliding, full=full)


def _narrow(batch: Any, step: int) -> Any:
    return replace(batch, sliding=replace(batch.sliding, sliding_window=batch.sliding.sliding_window - 1))


def _capped_drafts(drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    original = Drafter.step

    def step(self, *arguments):
        logits, states = original(self, *arguments)
        return 30 * torch.tanh(logits / 30), states

    patch.setattr(drafter_module.Drafter, "step", step)


def _unscaled_words(drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    """Only what the drafter reads of the target's table; the target itself is left alone."""
    original = Drafter.step

    def step(self, *arguments):
        scale, self.target.embedding_scale = self.target.embedding_scale, 1.0
        try:
            return original(self, *arguments)
        finally:
            self.target.embedding_scale = scale

    patch.setattr(drafter_module.Drafter, "step", step)


def _worst_clusters(drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    assert drafter.ordered_head is not None
    drafter.ordered_head.token_ordering = drafter.ordered_head.token_ordering.flip(0)


TRAPS = [
    Trap(name="norms with one more", fixture="gemma4-dense", breaks=_add_to_norms(1.0)),
    Trap(name="Gemma 3 norms with one less", fixture="gemma3-text", breaks=_add_to_norms(-1.0)),
    Trap(name="queries over the root of the head size", fixture="gemma4-dense", breaks=_scale_queries),
    Trap(name="Gemma 3 queries unscaled", fixture="gemma3-text", breaks=_no_query_scale),
    Trap(name="values without norm", fixture="gemma4-dense", breaks=_no_v_norm),
    Trap(
        name="values with the keys' norm weight",
        fixture="gemma4-dense",
        breaks=_with_planes(lambda k, v, weight: v.mul_(weight)),
        caught_by="value",
    ),
    Trap(
        name="values after rotation",
        fixture="gemma4-dense",
        breaks=_with_planes(lambda k, v, weight: v.copy_(k)),
        caught_by="value",
    ),
    Trap(name="the first dims turn", fixture="gemma4-dense", breaks=_turn_the_first_dims, caught_by="key"),
    Trap(
        name="full layers turn all pairs",
        fixture="gemma4-dense",
        breaks=_rotary(num_live_pairs=lambda kv: kv.head_dim // 2),
    ),
    Trap(
        name="frequencies over the turning part",
        fixture="gemma4-dense",
        breaks=_rotary(rope_theta=lambda kv: kv.rope_theta ** (kv.head_dim / (2 * kv.num_live_pairs))),
    ),
    Trap(
        name="full layers with the sliding base",
        fixture="gemma3-text",
        breaks=_rotary(rope_theta=lambda kv: 1e4),
    ),
    Trap(name="window one too wide", fixture="gemma4-dense", breaks=_window(1)),
    Trap(name="window one too narrow", fixture="gemma4-dense", breaks=_window(-1)),
    Trap(name="layer scalar forgotten", fixture="gemma4-dense", breaks=_no_layer_scalar),
    Trap(name="layer scalar on the branch", fixture="gemma4-dense", breaks=_scalar_on_the_branch),
    Trap(name="soft-cap forgotten", fixture="gemma4-dense", breaks=_no_soft_cap),
    Trap(name="embedding unscaled", fixture="gemma4-dense", breaks=_no_embedding_scale),
    Trap(name="placeholder ids read as words", fixture="gemma4-dense", breaks=_placeholders_are_words),
    Trap(name="gate and up swapped", fixture="gemma4-dense", breaks=_activation(_swapped)),
    Trap(name="exact gelu", fixture="gemma4-dense", breaks=_activation(lambda gate, up: F.gelu(gate) * up)),
    Trap(name="SiLU", fixture="gemma4-moe", breaks=_activation(lambda gate, up: F.silu(gate) * up)),
    Trap(
        name="router reads the normed stream",
        fixture="gemma4-moe",
        breaks=_router_reads_the_normed_stream,
        caught_by="router_weight",
    ),
    Trap(name="router scale forgotten", fixture="gemma4-moe", breaks=_no_router_scale, caught_by="router_weight"),
    Trap(name="router factor forgotten", fixture="gemma4-moe", breaks=_no_router_factor, caught_by="router_weight"),
    Trap(
        name="shares not renormalised",
        fixture="gemma4-moe",
        breaks=_shares_not_renormalised,
        caught_by="router_weight",
        is_hidden=True,
    ),
    Trap(name="expert scale forgotten", fixture="gemma4-moe", breaks=_no_per_expert_scale),
    Trap(name="per-layer input without context", fixture="gemma4-edge", breaks=_words_alone),
    Trap(name="sharing layers with another key norm", fixture="gemma4-edge", breaks=_own_keys_for_sharing_layers),
    Trap(name="image rows scaled like words", fixture="gemma4-vision", breaks=_image_rows_scaled),
    Trap(
        name="pixels from 0 to 1",
        fixture="gemma4-vision",
        breaks=_pixels_from_zero_to_one,
        part="vision",
        caught_by="vision_projected",
    ),
    Trap(
        name="standardised in bf16",
        fixture="gemma4-vision",
        breaks=_standardised_in_bf16,
        part="vision",
        caught_by="vision_projected",
    ),
    Trap(
        name="x and y swapped",
        fixture="gemma4-vision",
        breaks=_x_and_y_swapped,
        part="vision",
        caught_by="vision_projected",
    ),
    Trap(name="images causal", fixture="gemma4-vision", breaks=_images_seen("nowhere")),
    Trap(name="images both ways in full layers", fixture="gemma4-vision", breaks=_images_seen("everywhere")),
    Trap(
        name="draft: state before the word",
        fixture="gemma4-drafter",
        breaks=_state_before_the_word,
        part="drafter",
        caught_by="step_logits",
    ),
    Trap(
        name="draft: state without the final norm's weight",
        fixture="gemma4-drafter",
        breaks=_state_before_the_final_norm,
        part="drafter",
        caught_by="step_logits",
    ),
    Trap(
        name="draft: layer scalar forgotten",
        fixture="gemma4-drafter",
        breaks=_no_layer_scalar,
        part="drafter",
        caught_by="step_logits",
    ),
    Trap(
        name="draft: position moves within a round",
        fixture="gemma4-drafter",
        breaks=_draft_batches(_moved),
        part="drafter",
        caught_by="step_logits",
    ),
    Trap(
        name="draft: position one less",
        fixture="gemma4-drafter",
        breaks=_draft_batches(lambda batch, step: _moved(batch, -1)),
        part="drafter",
        caught_by="step_logits",
    ),
    Trap(
        name="draft: last W keys instead of W + 1",
        fixture="gemma4-drafter",
        breaks=_draft_batches(_narrow),
        part="drafter",
        caught_by="step_logits",
    ),
    Trap(
        name="draft: soft-cap applied",
        fixture="gemma4-drafter",
        breaks=_capped_drafts,
        part="drafter",
        caught_by="step_logits",
    ),
    Trap(
        name="draft: word unscaled",
        fixture="gemma4-drafter",
        breaks=_unscaled_words,
        part="drafter",
        caught_by="step_logits",
    ),
    Trap(
        name="draft: clusters in another order",
        fixture="gemma4-drafter-ordered",
        breaks=_worst_clusters,
        part="drafter",
        caught_by="step_logits",
    ),
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_the_named_fixture_notices(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = {"model": "load_model", "vision": "load_vision", "drafter": "load_drafter"}[trap.part]
    original = getattr(verify, loader)

    def load_and_break(*arguments: Any, **options: Any) -> Any:
        thing = original(*arguments, **options)
        with torch.inference_mode():
            trap.breaks(thing, monkeypatch)
        return thing

    monkeypatch.setattr(verify, loader, load_and_break)
    ways = () if trap.part == "drafter" else ("whole",)
    result = verify.verify(FIXTURES / trap.fixture, only_ways=ways, only_layouts=["plain"])
    failed = {finding.what.split(".")[0] for finding in result.findings if not finding.is_ok}
    assert trap.caught_by in failed
    if trap.is_hidden:
        assert "logits" not in failed
