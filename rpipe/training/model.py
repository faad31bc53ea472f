"""Which megatron-core model computes a Hugging Face one?

One GPTModel subclass for all shapes. It ends at the last hidden states: the output layer and the softmax run in
`loss.token_logprobs`, in chunks and only where a token is trained.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from rpipe.config import Training
from rpipe.training.attention import BucketAttention, Packed
from rpipe.training.convert import padded_vocab
from rpipe.training.hf import Llama3Rope, Shape


class PolicyModel(GPTModel):  # type: ignore[misc]
    """forward(input_ids [1, T], position_ids [1, T], None, packed_seq_params=Packed) -> hidden states [T, 1, hidden]."""

    def _preprocess(self, input_ids: Any, position_ids: Any, packed_seq_params: Packed, **others: Any) -> tuple[Any, ...]:
        found = list(
            super()._preprocess(input_ids=input_ids, position_ids=position_ids, packed_seq_params=packed_seq_params, **others)
        )
        if packed_seq_params.qkv_format != "thd":
            # megatron takes this for one sequence of T tokens: give each token the angles of its own position.
            # (Its thd rotary embedding splits and joins per sequence, in every layer.) packed_seq: all positions' angles,
            # not those that megatron would cut out for this context-parallel rank.
            angles = self.rotary_pos_emb(packed_seq_params.max_seqlen_q, packed_seq=True)
            found[1] = angles.index_select(0, position_ids[0])
        return tuple(found)

    def _postprocess(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        return hidden_states

    @property
    def output_weight_name(self) -> str:
        tied_here = self.share_embeddings_and_output_weights and self.pre_process
        return "embedding.word_embeddings.weight" if tied_here else "output_layer.weight"

    @property
    def output_weight(self) -> torch.nn.Parameter:
        """[padded vocab / tp, hidden]"""
        weight = self.get_parameter(self.output_weight_name)
        assert isinstance(weight, torch.nn.Parameter)
        return weight


def attention_layout(device: torch.device) -> str:
    """thd where a kernel reads cu_seqlens (Transformer Engine; Ascend's adaptor patches the stock attention), else buckets."""
    return "thd" if device.type == "npu" or _transformer_engine(device) else "buckets"


def _transformer_engine(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(shape: Shape, training: Training, device: torch.device, dtype: torch.dtype) -> TransformerConfig:
    cpu = device.type == "cpu"
    experts: dict[str, Any] = {}
    if shape.experts:
        experts = {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": shape.expert_size,
            "moe_router_topk": shape.experts_per_token,
            "moe_router_pre_softmax": not shape.norm_topk,  # a softmax over the chosen alone adds up to one
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": training.ep,
            "expert_tensor_parallel_size": 1,
        }
    recompute: dict[str, Any] = {}
    if training.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=shape.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=training.tp,
        pipeline_model_parallel_size=training.pp,
        context_parallel_size=training.cp,
        variable_seq_lengths=training.pp > 1,  # stages tell each other a micro-batch's length
        calculate_per_token_loss=True,  # gradients stay sums: divided once, at the step's end
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, even in a dense model
        use_cpu_initialization=cpu,
        # every weight is read from the folder, but without this parameters are not marked as cut over tp, and the
        # gradient norm then counts the first rank's part only
        perform_initialization=True,
        batch_p2p_comm=not cpu,
        # what needs Transformer Engine, apex or a compiler
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **experts,
        **recompute,
    )


def build(shape: Shape, config: TransformerConfig, device: torch.device, first: bool = True, last: bool = True) -> PolicyModel:
    """One pipeline stage: `first` embeds, `last` ends with the norm that the output layer reads."""
    experts = shape.experts or None
    if _transformer_engine(device):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=experts, qk_layernorm=shape.qk_norm)
    else:
        spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=shape.qk_norm, normalization="RMSNorm")
        if device.type != "npu":
            spec.submodules.self_attention.submodules.core_attention = BucketAttention
    model = PolicyModel(
        config,
        spec,
        vocab_size=padded_vocab(shape, config.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tied,
    )
    model.to(device=device, dtype=config.params_dtype)  # torch's norms come in float32
    if shape.rope is not None:
        model.rotary_pos_emb.inv_freq = stretch(model.rotary_pos_emb.inv_freq, shape.rope)
    return model


def stretch(frequencies: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Llama 3.1: high frequencies stay, low ones are divided by `factor`, those between are blended."""
    turns = rope.original_positions * frequencies / (2 * math.pi)  # over the positions of pre-training
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
