"""What becomes of every causal architecture of the installed ``transformers`` in the model plugin of that name: it
runs, or is refused for a reason.

python tests/support/fallback_survey.py            say what differs from docs/models/transformers-fallback.md
python tests/support/fallback_survey.py --write    put it there
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import transformers

from hardpoint.errors import UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo
from hardpoint_testing_torch import PlainAttentionBackend, create_model, worker_config
from hardpoint_testing_torch.tiny_models import TINY_SIZES
from hardpoint_transformers_models.architecture import causal_names
from hardpoint_transformers_models.model import create_transformers
from hardpoint_transformers_models.refusal import reason_of
from workspace import ROOT

__all__ = ["PAGE", "RUNS", "outcome", "survey", "survey_text", "tiny_fields_of", "with_survey", "written_outcomes"]

PAGE = ROOT / "docs/models/transformers-fallback.md"
RUNS = ""
_BEGIN = "<!-- Written by tests/support/fallback_survey.py --write, from here. -->\n"
_END = "<!-- To here. -->\n"

_TOKENS: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_HEADS: Mapping[str, Any] = {"head_dim": 16}
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_GROUPS: Mapping[str, Any] = {
    **_EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_DECODER: Mapping[str, Any] = {"is_decoder": True}
_CONVOLVED: Mapping[str, Any] = {"layer_types": ["conv", "full_attention", "conv"]}
_TURNED: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "AXK1ForCausalLM": {**_LATENT, **_GROUPS},
    "AfmoeForCausalLM": _EXPERTS,
    "BertGenerationDecoder": _DECODER,
    "BertLMHeadModel": _DECODER,
    "BlenderbotForCausalLM": {"decoder_attention_heads": 4},
    "CamembertForCausalLM": _DECODER,
    "CodeGenForCausalLM": {"rotary_dim": 8},
    "CohereCompassForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 7,
        "rope_parameters": {"full_attention": _TURNED, "sliding_attention": _TURNED},
    },
    "Data2VecTextForCausalLM": _DECODER,
    "DbrxForCausalLM": {
        **{"d_model": 48, "n_heads": 4, "n_layers": 3, "max_seq_len": 256},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeepseekV2ForCausalLM": {**_LATENT, **_GROUPS, "topk_method": "greedy"},
    "DeepseekV3ForCausalLM": {**_LATENT, **_GROUPS},
    "DogeForCausalLM": {"num_experts": 16},
    "Dots1ForCausalLM": {**_GROUPS, "n_group": 1},
    "Dots3NoteForCausalLM": {**_LATENT, **_GROUPS},
    "ElectraForCausalLM": _DECODER,
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24},
    "ErnieForCausalLM": _DECODER,
    "ExaoneMoeForCausalLM": _GROUPS,
    "GPTJForCausalLM": {"rotary_dim": 8},
    "GPTNeoForCausalLM": {"num_hidden_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "Gemma2ForCausalLM": _HEADS,
    "Gemma3ForCausalLM": _HEADS,
    "Gemma4AssistantForCausalLM": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "Gemma4UnifiedForCausalLM": {**_HEADS, "global_head_dim": 16},
    "GemmaForCausalLM": _HEADS,
    "Glm4ForCausalLM": _HEADS,
    "Glm4MoeForCausalLM": {**_HEADS, **_GROUPS},
    "Glm4MoeLiteForCausalLM": {**_LATENT, **_GROUPS},
    "GlmForCausalLM": _HEADS,
    "HeliumForCausalLM": {"head_dim": 12},
    "HunYuanDenseV1ForCausalLM": _HEADS,
    "HunYuanMoEV1ForCausalLM": {**_HEADS, "num_experts": 4, "moe_topk": 2},
    "JetMoeForCausalLM": {"kv_channels": 12, "num_local_experts": 4},
    "Lfm2ForCausalLM": _CONVOLVED,
    "Lfm2MoeForCausalLM": _CONVOLVED,
    "LongcatFlashForCausalLM": {
        **_LATENT,
        **{"num_layers": 2, "head_dim": 8, "expert_ffn_hidden_size": 24, "ffn_hidden_size": 40},
        **{"n_routed_experts": 6, "zero_expert_num": 2, "moe_topk": 2},
    },
    "MiniCPM3ForCausalLM": _LATENT,
    "MinistralForCausalLM": _HEADS,
    "ModernBertDecoderForCausalLM": {"cls_token_id": 1, "sep_token_id": 2},
    "OlmoeForCausalLM": _EXPERTS,
    "ReformerModelWithLMHead": {**_DECODER, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "RoCBertForCausalLM": _DECODER,
    "RobertaForCausalLM": _DECODER,
    "RobertaPreLayerNormForCausalLM": _DECODER,
    "SolarOpenForCausalLM": _EXPERTS,
    "StableLmForCausalLM": {"rope_parameters": {**_TURNED, "partial_rotary_factor": 0.5}},
    "VaultGemmaForCausalLM": _HEADS,
    "XLMRobertaForCausalLM": _DECODER,
    "XLMRobertaXLForCausalLM": _DECODER,
    "XLNetLMHeadModel": {"d_head": 12},
    "XmodForCausalLM": {**_DECODER, "languages": ["en_XX"], "default_language": "en_XX"},
    "YoutuForCausalLM": _LATENT,
}
"""What an architecture needs beside the usual sizes, so that they fit together. Encoders that may decode do."""
_WITHOUT: Mapping[str, tuple[str, ...]] = {
    "ProphetNetForCausalLM": ("num_hidden_layers",),
    "XLNetLMHeadModel": ("max_position_embeddings",),
}
"""Fields that a class refuses to be told."""


def tiny_fields_of(architecture: str) -> dict[str, Any]:
    """The configuration, of a size that is built at once, in which ``architecture`` is tried."""
    fields = {**TINY_SIZES, **_TOKENS, **FIELDS.get(architecture, {})}
    return {name: value for name, value in fields.items() if name not in _WITHOUT.get(architecture, ())}


def outcome(architecture: str) -> str:
    """:data:`RUNS`, or why the tiny model of ``architecture`` is refused. Other errors are raised."""
    info = ModelInfo(
        artifact=ModelArtifact(name="tiny", root="/tiny", files=("config.json",), source="test"),
        architecture=architecture,
        config=tiny_fields_of(architecture),
        max_position=256,
        vocab_size=TINY_SIZES["vocab_size"],
        dtype="float32",
        loader="safetensors",
    )
    try:
        create_model(create_transformers, worker_config(info), PlainAttentionBackend())
    except UnsupportedModelError as error:
        return reason_of(error)
    return RUNS


def survey() -> dict[str, str]:
    """The outcome of every causal architecture of the library, by its name."""
    return {name: outcome(name) for name in sorted(causal_names())}


def survey_text(outcomes: Mapping[str, str]) -> str:
    """As it stands on the page: those that run, and a table of reasons."""
    running = [f"`{name}`" for name, reason in outcomes.items() if reason == RUNS]
    groups: dict[str, list[str]] = {}
    for name, reason in outcomes.items():
        if reason != RUNS:
            groups.setdefault(reason, []).append(f"`{name}`")
    rows = [f"| {reason.replace('|', '/')} | {', '.join(names)} |" for reason, names in sorted(groups.items())]
    library = f"`transformers` {transformers.__version__}"
    told = f"Of the {len(outcomes)} causal architectures of {library} these {len(running)} run:"
    return "\n".join(
        (told, f"{', '.join(running)}.", "", "| refused because | architectures |", "|---|---|", *rows, "")
    )


def written_outcomes(reason: str) -> list[str]:
    """The architectures that the page lists under ``reason``."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    running, *rows = rest.partition(_END)[0].strip().splitlines()[1:]
    listed = running if reason == RUNS else "".join(row for row in rows if row.startswith(f"| {reason} |"))
    return re.findall(r"`(\w+)`", listed)


def with_survey(page: str, text: str) -> str:
    """``page`` with ``text`` in the place that is meant for it."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{text}{_END}{after}"


def main() -> None:
    written = PAGE.read_text(encoding="utf-8")
    now = with_survey(written, survey_text(survey()))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(now, encoding="utf-8")
    elif now != written:
        sys.exit("\n".join(line for line in now.splitlines() if line not in written.splitlines()))


if __name__ == "__main__":
    main()
