"""Configs of every supported class: each option is varied, and changes are refused, or computed as in transformers."""

import pytest
import torch

from tests.interop.huggingface.architectures import ARCHITECTURES, MIN_CONFIGURATIONS, configurations
from tests.interop.huggingface.config_changes import ChangeSearch

# Changes per class in the tests; `benchmarks/formats.py` tries more.
CHANGES = {"decoder": 8, "encoder": 3, "encoder_decoder": 6, "image": 4}
# Keys with one supported value, and those that follow from other keys.
FIXED_KEYS = {
    *("architectures", "id2label", "dense_act_fn", "decoder_start_token_id", "pad_token_id", "pooler_hidden_size"),
    *("is_decoder", "is_encoder_decoder", "add_cross_attention", "scale_attn_by_inverse_layer_idx", "inner_group_num"),
    *("use_bidirectional_attention", "do_layer_norm_before", "_remove_final_layer_norm"),
    *("layer_norm_elementwise_affine", "pooler_act", "pooler_output_size", "relative_attention_num_buckets"),
}
FIXED_KEYS_OF_CLASSES = {"ForMaskedLM": {"tie_word_embeddings", "decoder_bias"}, "Gemma3": {"attn_logit_softcapping"}}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_configurations_differ_and_have_each_value_of_each_option(name):
    found = configurations(name)
    assert len({str(table) for table in found}) == len(found) >= MIN_CONFIGURATIONS
    assert found == configurations(name)
    for alternatives in ARCHITECTURES[name].options:
        for alternative in alternatives:
            assert any(alternative.items() <= table.items() for table in found), alternative


@pytest.fixture
def one_thread():
    """The models are tiny: several threads take longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_changed_configs_are_refused_or_exact(transformers, tmp_path, name):
    search = ChangeSearch(transformers, name, tmp_path)
    for seed in range(CHANGES[ARCHITECTURES[name].kind]):
        outcome, description = search.outcome(seed)
        assert outcome != "wrong", description
    # Each key that the import reads is an option of the class.
    fixed = FIXED_KEYS.union(*(keys for part, keys in FIXED_KEYS_OF_CLASSES.items() if part in name))
    base = search.base(0)
    assert {key for key in base.read_keys if key in base.table} - search.known_values.keys() - fixed == set()
