"""Supported classes of transformers, with the values of every option that Regard reads: used by tests and benchmarks.

A class is one entry of `ARCHITECTURES`. `configurations` draws configs in which each value of each option occurs.
"""

import copy
import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from tests.interop.model_comparison import VOCAB

Kind = Literal["decoder", "encoder", "encoder_decoder", "image"]
# Alternatives of one option; an alternative sets one key, or several that belong together.
Alternatives = Sequence[dict[str, Any]]

MIN_CONFIGURATIONS = 5


class ClassOptions(NamedTuple):
    """A class of transformers: its config class, and alternative values of its options."""

    kind: Kind
    config: str
    options: Sequence[Alternatives]


def values(key: str, *alternatives: Any) -> Alternatives:
    """Alternative values of one key."""
    return [{key: value} for value in alternatives]


def configurations(name: str) -> list[dict[str, Any]]:
    """Configs of a class, at least five: each alternative of each option occurs in at least one of them.

    The same for each call. The first config has the first alternative of each option.
    """
    options = ARCHITECTURES[name].options
    count = max(MIN_CONFIGURATIONS, *map(len, options))
    tables: list[dict[str, Any]] = [{} for _ in range(count)]
    for i, alternatives in enumerate(options):
        others = [alternatives[j % len(alternatives)] for j in range(1, count)]
        random.Random(f"{name} {i}").shuffle(others)
        for table, chosen in zip(tables, [alternatives[0], *others]):
            table.update(copy.deepcopy(chosen))  # transformers changes tables of rotary positions
    return tables


# -- language models --------------------------------------------------------------------------------------------------

_BOOL = (False, True)
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "silu", "swish")
_GATED = ("silu", "swish", "gelu_pytorch_tanh", "gelu_new")
_IDS = values("vocab_size", VOCAB), values("bos_token_id", 2), values("eos_token_id", 3), values("pad_token_id", 0)
_THETA = {"rope_theta": 500.0}
_YARN = {"rope_type": "yarn", **_THETA, "factor": 4.0, "original_max_position_embeddings": 64}
# Of the channel pairs, some are scaled fully, some partly and some not at all.
_LLAMA3 = {
    **{"rope_type": "llama3", **_THETA, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
_DEFAULT_ROPE = {"rope_type": "default", **_THETA}
_LOCAL_ROPE = {"rope_type": "default", "rope_theta": 9.0}
_LINEAR = {"rope_type": "linear", **_THETA, "factor": 3.0}
_ROPE: Alternatives = [
    {"max_position_embeddings": 40},
    *({"max_position_embeddings": 64, "rope_parameters": table} for table in (_DEFAULT_ROPE, _LINEAR, _LLAMA3, _YARN)),
    # Texts are longer than this.
    {"max_position_embeddings": 5, "rope_parameters": {"rope_type": "dynamic", **_THETA, "factor": 3.0}},
]
_HEADS: Alternatives = [
    dict(hidden_size=24, num_attention_heads=6, num_key_value_heads=2),
    dict(hidden_size=24, num_attention_heads=6, num_key_value_heads=6),
    dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=1),
    dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=None),
]
_HEADS_OF_GEMMA: Alternatives = [
    dict(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=10),
    dict(hidden_size=24, num_attention_heads=6, num_key_value_heads=6, head_dim=4),
    dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=1, head_dim=8),
]
_TYPES = ("full_attention", "sliding_attention")
_LAYERS = values("num_hidden_layers", 2, 3, 1)
_LLAMA = [
    *_IDS,
    *(values("intermediate_size", 37, 50), values("rms_norm_eps", 1e-6, 1e-2)),
    *(values("hidden_act", *_GATED), values("tie_word_embeddings", *_BOOL)),
]
_BIASES = values("attention_bias", *_BOOL), values("mlp_bias", *_BOOL)
_HEAD_WIDTHS = values("head_dim", None, 10)
_QWEN_WINDOWS: Alternatives = [
    dict(num_hidden_layers=2, use_sliding_window=False, sliding_window=3),
    dict(num_hidden_layers=2, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=2, layer_types=[*_TYPES, _TYPES[0]]),
    dict(num_hidden_layers=1, use_sliding_window=True, sliding_window=None),
]
_GEMMA = [
    *(option for option in _LLAMA if "hidden_act" not in option[0]),
    *(_HEADS_OF_GEMMA, values("attention_bias", *_BOOL)),
]
_GEMMA_WINDOWS: Alternatives = [
    dict(num_hidden_layers=3, sliding_window=3),
    dict(num_hidden_layers=2, sliding_window=2, layer_types=[*_TYPES]),
    dict(num_hidden_layers=2, sliding_window=4, layer_types=[_TYPES[0]] * 2),
]
_GEMMA2 = [
    *(*_GEMMA, values("hidden_activation", *_GATED)),
    *(values("final_logit_softcapping", 3.0, None, 30.0), values("query_pre_attn_scalar", 24, 10)),
]
_PARTIAL_ROPE: Alternatives = [
    {},
    *({"rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": share}} for share in (0.5, 1.0)),
]
_GPT2 = [
    *_IDS,
    *([dict(n_embd=30, n_head=5), dict(n_embd=24, n_head=1), dict(n_embd=24, n_head=3)], values("n_layer", 2, 3, 1)),
    *(values("n_inner", None, 41), values("n_positions", 13, 20), values("layer_norm_epsilon", 1e-5, 1e-2)),
    *(values("activation_function", *_ACTIVATIONS), values("tie_word_embeddings", True, False)),
    *(values("scale_attn_weights", True, False), values("resid_pdrop", 0.1, 0.0)),
]
_DECODERS = {
    "GPT2LMHeadModel": ("GPT2Config", _GPT2),
    "LlamaForCausalLM": ("LlamaConfig", [*_LLAMA, _LAYERS, _HEADS, _HEAD_WIDTHS, *_BIASES, _ROPE]),
    "Qwen2ForCausalLM": ("Qwen2Config", [*_LLAMA, _HEADS, _QWEN_WINDOWS, _ROPE]),
    "Qwen3ForCausalLM": ("Qwen3Config", [*_LLAMA, _HEADS, values("head_dim", 4, 10), _QWEN_WINDOWS, _BIASES[0], _ROPE]),
    "MistralForCausalLM": (
        "MistralConfig",
        [*_LLAMA, _LAYERS, _HEADS[:3], _HEAD_WIDTHS, values("sliding_window", None, 3), _ROPE],
    ),
    "SmolLM3ForCausalLM": (
        "SmolLM3Config",
        [
            *(*_LLAMA, _HEADS, *_BIASES, _ROPE),
            [
                dict(num_hidden_layers=2),
                dict(num_hidden_layers=2, no_rope_layers=[1, 0]),
                dict(num_hidden_layers=3, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=3),
                dict(num_hidden_layers=2, no_rope_layers=[1, 1], use_sliding_window=True, layer_types=[*_TYPES])
                | dict(sliding_window=2),
            ],
        ],
    ),
    "Phi3ForCausalLM": (
        "Phi3Config",
        [
            *(*_LLAMA, _LAYERS, _HEADS, values("max_position_embeddings", 40, 64)),
            *(values("sliding_window", None, 4), _PARTIAL_ROPE),
        ],
    ),
    "Olmo2ForCausalLM": ("Olmo2Config", [*_LLAMA, _LAYERS, _HEADS, values("attention_bias", *_BOOL), _ROPE]),
    "GemmaForCausalLM": ("GemmaConfig", [*_GEMMA, _LAYERS, values("hidden_act", *_GATED, "gelu"), _ROPE]),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        [*_GEMMA2, _GEMMA_WINDOWS, values("attn_logit_softcapping", 2.0, None, 50.0), _ROPE],
    ),
    "Gemma3ForCausalLM": (
        "Gemma3TextConfig",
        [
            *(*_GEMMA2, _GEMMA_WINDOWS, values("max_position_embeddings", 40, 64)),
            [
                {},
                *(
                    {"rope_parameters": {"full_attention": full, "sliding_attention": _LOCAL_ROPE}}
                    for full in (_DEFAULT_ROPE, _LINEAR, _LLAMA3, _YARN)
                ),
            ],
        ],
    ),
    "GPTNeoXForCausalLM": (
        "GPTNeoXConfig",
        [
            *(*_IDS, _LAYERS, values("intermediate_size", 37, 50), values("layer_norm_eps", 1e-5, 1e-2)),
            [dict(hidden_size=48, num_attention_heads=3), dict(hidden_size=32, num_attention_heads=2)],
            *(values("hidden_act", *_ACTIVATIONS), values("tie_word_embeddings", *_BOOL)),
            *(values("use_parallel_residual", True, False), values("attention_bias", True, False)),
            values("hidden_dropout", 0.0, 0.1),
            [*_ROPE, *({"max_position_embeddings": 40} | rope for rope in _PARTIAL_ROPE[1:])],
        ],
    ),
    "OPTForCausalLM": (
        "OPTConfig",
        [
            *(*_IDS, _LAYERS, values("ffn_dim", 37, 50), values("max_position_embeddings", 13, 20)),
            [
                dict(hidden_size=24, num_attention_heads=3, word_embed_proj_dim=24),
                dict(hidden_size=30, num_attention_heads=5, word_embed_proj_dim=30),
            ],
            *(values("activation_function", *_ACTIVATIONS), values("tie_word_embeddings", True, False)),
            *(values("enable_bias", True, False), values("dropout", 0.1, 0.0)),
        ],
    ),
}

# -- text encoders ----------------------------------------------------------------------------------------------------

HEADS_OF_ENCODERS = (
    *("Model", "ForMaskedLM", "ForSequenceClassification"),
    *("ForTokenClassification", "ForQuestionAnswering"),
)
# For classifiers of texts; token classifiers use the number only.
_LABELS: Alternatives = [
    dict(num_labels=3),
    dict(num_labels=2, problem_type="single_label_classification"),
    dict(num_labels=1),
    dict(num_labels=4, problem_type="multi_label_classification"),
    dict(num_labels=1, problem_type="regression"),
]
_BERT_HEADS: Alternatives = [
    dict(hidden_size=30, num_attention_heads=5),
    dict(hidden_size=24, num_attention_heads=1),
    dict(hidden_size=24, num_attention_heads=3),
]
_BERT = [
    *(values("vocab_size", VOCAB), _BERT_HEADS),
    *(values("intermediate_size", 37, 50), values("layer_norm_eps", 1e-12, 1e-3)),
    *(values("max_position_embeddings", 13, 20), values("hidden_dropout_prob", 0.1, 0.0)),
]
_BERT_ACTIVATIONS = values("hidden_act", *_ACTIVATIONS)
_SEGMENTS = values("type_vocab_size", 2, 3, 1)
_ROBERTA = [*_BERT, _LAYERS, _BERT_ACTIVATIONS, _SEGMENTS, values("pad_token_id", 1, 4, 0)]
_EMBEDDING_WIDTHS = values("embedding_size", 11, 24, 30)
_ENCODERS: dict[str, Sequence[Alternatives]] = {
    "Bert": [*_BERT, _LAYERS, _BERT_ACTIVATIONS, _SEGMENTS],
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "DistilBert": [
        values("vocab_size", VOCAB),
        [dict(dim=30, n_heads=5), dict(dim=24, n_heads=1), dict(dim=24, n_heads=3)],
        *(values("n_layers", 2, 3, 1), values("hidden_dim", 37, 50), values("max_position_embeddings", 13, 20)),
        *(values("activation", *_ACTIVATIONS), values("sinusoidal_pos_embds", *_BOOL), values("dropout", 0.1, 0.0)),
    ],
    "Albert": [
        *(*_BERT, _BERT_ACTIVATIONS, _SEGMENTS, _EMBEDDING_WIDTHS),
        [dict(num_hidden_layers=3), dict(num_hidden_layers=4, num_hidden_groups=2), dict(num_hidden_layers=1)],
    ],
    "Electra": [*_BERT, _LAYERS, _BERT_ACTIVATIONS, _SEGMENTS, _EMBEDDING_WIDTHS],
    "MPNet": [*_BERT, _LAYERS, _BERT_ACTIVATIONS, values("pad_token_id", 1)],
    "DebertaV2": [
        *(*_BERT, _LAYERS, _BERT_ACTIVATIONS, values("type_vocab_size", 0, 2), values("legacy", True)),
        [dict(relative_attention=True, share_att_key=True, norm_rel_ebd="layer_norm")],
        values("pos_att_type", ["p2c", "c2p"], "c2p|p2c"),
        *(values("position_biased_input", False, True), values("pooler_hidden_act", "gelu", "tanh", "relu")),
        [
            dict(position_buckets=4),
            dict(position_buckets=8, max_relative_positions=6),
            dict(position_buckets=-1, max_relative_positions=3),
            dict(position_buckets=-1, max_relative_positions=-1),
        ],
    ],
    "ModernBert": [
        *(values("vocab_size", VOCAB), _BERT_HEADS, values("intermediate_size", 37, 50), values("pad_token_id", 0)),
        *(values("norm_eps", 1e-5, 1e-3), values("norm_bias", *_BOOL), *_BIASES, values("classifier_bias", *_BOOL)),
        *(values("classifier_pooling", "cls", "mean"), values("mlp_dropout", 0.0, 0.1)),
        values("max_position_embeddings", 40, 64),
        [
            dict(num_hidden_layers=4, local_attention=4),
            dict(num_hidden_layers=3, local_attention=6, global_attn_every_n_layers=2),
            dict(num_hidden_layers=2, local_attention=3, layer_types=[*_TYPES]),
            dict(num_hidden_layers=2, layer_types=[_TYPES[0]] * 2),
        ],
        [
            dict(hidden_activation=name, classifier_activation=name)
            for name in ("gelu", "gelu_pytorch_tanh", "gelu_new", "silu")
        ],
        [{}, {"rope_parameters": {"full_attention": _DEFAULT_ROPE, "sliding_attention": _LOCAL_ROPE}}],
    ],
}
# Classes whose masked-language-model head has an activation that does not depend on the config: another one is refused.
_FIXED_MASK_ACTIVATION = ("Roberta", "XLMRoberta", "Camembert", "Electra", "MPNet")


def _encoder_options(family: str, head: str) -> Sequence[Alternatives]:
    options = list(_ENCODERS[family])
    if head == "ForMaskedLM" and family in _FIXED_MASK_ACTIVATION:
        options[options.index(_BERT_ACTIVATIONS)] = values("hidden_act", "gelu")
    if head == "ForSequenceClassification":
        options.append(_LABELS)
    if head == "ForTokenClassification":
        options.append(values("num_labels", 2, 3, 5))
    return options


# -- encoder-decoders -------------------------------------------------------------------------------------------------

TRANSLATION_VOCAB = 50
_BART = [
    *(values("vocab_size", TRANSLATION_VOCAB), values("init_std", 0.4)),
    [
        dict(d_model=24, encoder_attention_heads=4, decoder_attention_heads=4),
        dict(d_model=33, encoder_attention_heads=3, decoder_attention_heads=3),
        dict(d_model=24, encoder_attention_heads=1, decoder_attention_heads=1),
    ],
    [
        dict(encoder_layers=2, decoder_layers=3),
        dict(encoder_layers=3, decoder_layers=1),
        dict(encoder_layers=1, decoder_layers=2),
    ],
    [dict(encoder_ffn_dim=37, decoder_ffn_dim=37), dict(encoder_ffn_dim=50, decoder_ffn_dim=50)],
    *(values("activation_function", *_ACTIVATIONS), values("scale_embedding", *_BOOL)),
    *(values("max_position_embeddings", 40, 64), values("dropout", 0.1, 0.0)),
]
_TIED = values("tie_word_embeddings", True, False)
_MARIAN_IDS = dict(pad_token_id=49, eos_token_id=0, decoder_start_token_id=49, forced_eos_token_id=0)
_SEPARATE = dict(share_encoder_decoder_embeddings=False)
_T5 = [
    values("vocab_size", TRANSLATION_VOCAB),
    *(values("d_model", 24, 41), [dict(num_heads=3, d_kv=5), dict(num_heads=2, d_kv=16)], values("d_ff", 37, 50)),
    [dict(num_layers=2, num_decoder_layers=3), dict(num_layers=2), dict(num_layers=1, num_decoder_layers=2)],
    *(values("layer_norm_epsilon", 1e-6, 1e-3), values("dropout_rate", 0.1, 0.0), values("n_positions", 512, 40)),
    values("feed_forward_proj", *_ACTIVATIONS, "gated-gelu", "gated-silu", "gated-gelu_new"),
    [
        dict(relative_attention_num_buckets=32, relative_attention_max_distance=128),
        dict(relative_attention_num_buckets=8, relative_attention_max_distance=9),
    ],
]
_ENCODER_DECODERS = {
    "BartForConditionalGeneration": ("BartConfig", [*_BART, _TIED]),
    "MBartForConditionalGeneration": ("MBartConfig", [*_BART, _TIED, values("decoder_start_token_id", 3)]),
    "PegasusForConditionalGeneration": ("PegasusConfig", [*_BART, _TIED]),
    "BlenderbotForConditionalGeneration": (
        "BlenderbotConfig",
        [*_BART, _TIED, values("encoder_no_repeat_ngram_size", 0)],
    ),
    "MarianMTModel": (
        "MarianConfig",
        [*_BART, _TIED, [_MARIAN_IDS], [{}, _SEPARATE, dict(_SEPARATE, decoder_vocab_size=57)]],
    ),
    "M2M100ForConditionalGeneration": ("M2M100Config", [*_BART, _TIED]),
    "T5ForConditionalGeneration": (
        "T5Config",
        [*_T5, [dict(tie_word_embeddings=True), dict(tie_word_embeddings=False, scale_decoder_outputs=False)]],
    ),
    "MT5ForConditionalGeneration": ("MT5Config", [*_T5, _TIED]),
}

# -- image models -----------------------------------------------------------------------------------------------------

_IMAGE = [
    *(_BERT_HEADS, _LAYERS, values("num_channels", 3, 1), values("layer_norm_eps", 1e-6, 1e-3)),
]
_VIT = [
    *(*_IMAGE, values("intermediate_size", 37, 50), values("hidden_act", *_ACTIVATIONS)),
    *(values("qkv_bias", True, False), values("hidden_dropout_prob", 0.0, 0.1)),
    [
        dict(image_size=[8, 12], patch_size=4),
        dict(image_size=8, patch_size=[2, 2]),
        dict(image_size=15, patch_size=5),
    ],
]
_SQUARES: Alternatives = [
    dict(image_size=12, patch_size=4),
    dict(image_size=8, patch_size=4),
    dict(image_size=12, patch_size=6),
]
_DINO = [
    *(*_IMAGE, _SQUARES, values("qkv_bias", True, False), values("mlp_ratio", 4, 3, 1)),
    *([*values("hidden_act", *_ACTIVATIONS), dict(use_swiglu_ffn=True)], values("layerscale_value", 1.0, 0.1)),
    values("hidden_dropout_prob", 0.0, 0.1),
]
_TOWER = [*_IMAGE, _SQUARES, values("intermediate_size", 37, 50), values("hidden_act", *_ACTIVATIONS, "quick_gelu")]
_IMAGE_LABELS = values("num_labels", 2, 3, 5)
_DINO_1, _DINO_2 = [*_DINO, values("use_mask_token", False)], [*_DINO, values("num_register_tokens", 4, 1, 3)]
_IMAGE_MODELS = {
    "ViTModel": ("ViTConfig", _VIT),
    "ViTForImageClassification": ("ViTConfig", [*_VIT, _IMAGE_LABELS]),
    "DeiTModel": ("DeiTConfig", _VIT),
    "DeiTForImageClassification": ("DeiTConfig", [*_VIT, _IMAGE_LABELS]),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", [*_VIT, _IMAGE_LABELS]),
    "Dinov2Model": ("Dinov2Config", _DINO_1),
    "Dinov2ForImageClassification": ("Dinov2Config", [*_DINO_1, _IMAGE_LABELS]),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", _DINO_2),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", [*_DINO_2, _IMAGE_LABELS]),
    "CLIPVisionModel": ("CLIPVisionConfig", _TOWER),
    "SiglipVisionModel": ("SiglipVisionConfig", [*_TOWER, values("vision_use_head", True, False)]),
}

ARCHITECTURES: dict[str, ClassOptions] = {
    **{name: ClassOptions("decoder", *entry) for name, entry in _DECODERS.items()},
    **{
        f"{family}{head}": ClassOptions("encoder", f"{family}Config", _encoder_options(family, head))
        for family in _ENCODERS
        for head in HEADS_OF_ENCODERS
    },
    **{name: ClassOptions("encoder_decoder", *entry) for name, entry in _ENCODER_DECODERS.items()},
    **{name: ClassOptions("image", *entry) for name, entry in _IMAGE_MODELS.items()},
}
