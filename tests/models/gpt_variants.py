"""Options of decoder-only models beyond those of GPT-2 and Llama."""

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "windows, soft-capping, sandwich norms": dict(
        **dict(norm="sandwich", norm_kind="rms_zero_centered", embedding_scale=True, logit_cap=3.0, kv_heads=2),
        **dict(sliding_windows=(3, 0), window_rotary_base=50.0, score_cap=2.0, score_width=5.0),
    ),
    "windows in all layers": dict(sliding_windows=(2,), score="cosine"),
    "output norms, joint QK-norm, YaRN": dict(
        **dict(norm="output", qk_norm_joint=True, rotary_factor=4.0, rotary_context=16, rotary_scaling="yarn"),
        unrotated_layers=(1,),
    ),
    "parallel, partial rotary": dict(parallel=True, rotary_share=0.5, norm_kind="layer", qk_norm=False, bias="all"),
    "position offset": dict(positions="learned", position_offset=2),
}
