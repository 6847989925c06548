"""Architectures to train: real ones from Hugging Face and torch.nn, made tiny, and the awkward ones.

Each is `(kind, build, batch, loss)`: `build()` makes the model in training mode, `batch()` its inputs, both
from PyTorch's random state; `loss(model, inputs)` is the scalar to minimise. Weights are random and between
100 KB and 1 MB, so that they outweigh the activations of a batch. Dropout, layer drop and the like are on as
each configuration's defaults have them. SpecAugment draws from NumPy's random state: the speech models leave it off,
but for hubert_spec_augment.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import awkward

BATCH, LENGTH, VOCABULARY = 2, 8, 128


class Architecture(NamedTuple):
    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]


# ---- batches -----------------------------------------------------------------------------------------


def tokens(batch=BATCH, length=LENGTH, vocabulary=VOCABULARY):
    """Above the numbers that configurations use for padding and the like."""
    return torch.randint(3, vocabulary, (batch, length))


def vector_batch():
    return torch.randn(4, awkward.WIDTH)


def shaped(*shape):
    return partial(torch.randn, *shape)


def causal_batch():
    x = tokens()
    return {"input_ids": x, "labels": x}


def masked_batch():
    """With the end of the last sequence padded."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[-1, -2:] = 0
    return {"input_ids": tokens(), "attention_mask": mask, "labels": tokens()}


def translation_batch():
    return {"input_ids": tokens(), "labels": tokens(length=6)}


def padded_batch():
    """Where it has no padding, Hugging Face's models leave the mask out."""
    inputs = translation_batch()
    mask = torch.ones_like(inputs["labels"])
    mask[0, 4:] = torch.randint(0, 2, ())
    return {**inputs, "decoder_attention_mask": mask}


def image_batch(size=16, classes=10):
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, classes, (BATCH,))}


def segmentation_batch(size=16, classes=5):
    labels = torch.randint(0, classes, (BATCH, size, size))
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": labels}


def pretraining_speech_batch(positions=9):
    return {
        "input_values": torch.randn(BATCH, 80),
        "mask_time_indices": (torch.rand(BATCH, positions) < 0.3).long(),
        "sampled_negative_indices": torch.randint(0, positions * BATCH, (BATCH, positions, 5)),
    }


def speech_batch():
    return {"input_values": torch.randn(BATCH, 80), "labels": torch.randint(1, 30, (BATCH, 4))}


def whisper_batch():
    return {"input_features": torch.randn(BATCH, 16, 32), "labels": tokens(length=6)}


def pair_batch():
    """An image and a caption."""
    return {"input_ids": tokens(), "pixel_values": torch.randn(BATCH, 3, 16, 16), "return_loss": True}


def image_chat_batch():
    """Four positions of the text are those of the image's patches."""
    text = torch.cat([torch.full((BATCH, 4), 2), tokens()], 1)
    return {"input_ids": text, "pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": text}


def series_batch():
    return {"past_values": torch.randn(BATCH, 32, 3), "future_values": torch.randn(BATCH, 8, 3)}


def graph_batch(nodes=12, edges=30):
    return torch.randint(0, 16, (nodes,)), torch.randint(0, nodes, (2, edges))


def recommender_batch():
    return torch.randn(4, awkward.WIDTH), [torch.randint(0, 100, (4, 3)) for _ in range(6)]


def packed_batch():
    return torch.randint(0, 64, (3, 8)), torch.tensor([5, 8, 3])


# ---- losses ------------------------------------------------------------------------------------------


def own_loss(model, inputs):
    """The one that Hugging Face models return where they are given labels."""
    return model(**inputs).loss


def hidden_state_loss(model, inputs):
    """Beside the model's own, a penalty on every hidden state, as distillation and probes use them."""
    outputs = model(**inputs, output_hidden_states=True)
    return outputs.loss + 0.01 * sum(h.square().mean() for h in outputs.hidden_states)


def classified(model, inputs):
    """Cross entropy with classes that follow from the inputs."""
    logits = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    first = inputs[0] if isinstance(inputs, tuple) else inputs
    labels = first.flatten(1).float().sum(1).long().abs() % awkward.CLASSES if first.dim() > 1 else first % 10
    return F.cross_entropy(logits, labels)


def next_token(model, x):
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def translated(model, inputs):
    source, target = inputs
    return F.cross_entropy(model(source, target).flatten(0, 1), target.flatten())


def reconstructed(model, x):
    return F.mse_loss(model(x), x)


def evidence_bound(model, x):
    decoded, mean, log_variance = model(x)
    return F.mse_loss(decoded, x) - 0.01 * (1 + log_variance - mean.square() - log_variance.exp()).mean()


def matched(model, x):
    """Each row with its own key, which is the first of its logits."""
    return F.cross_entropy(model(x), torch.arange(len(x), device=x.device))


def contrasted(model, x):
    first, second = model(x), model(x + 0.1 * torch.randn_like(x))
    return F.cross_entropy(first @ second.T, torch.arange(len(x), device=x.device))


def deeply_supervised(model, x):
    outputs, hidden = model(x)
    labels = torch.arange(len(x), device=x.device) % awkward.CLASSES
    return sum(F.cross_entropy(logits, labels) for logits in outputs) + 0.1 * sum(h.square().mean() for h in hidden)


def with_weight_penalty(model, x):
    return next_token(model, x) + 0.01 * sum(p.square().sum() for p in model.parameters())


def with_gradient_penalty(model, x):
    """As critics are trained: a gradient of a gradient."""
    x = x.requires_grad_()
    value = model(x).logsumexp(-1).mean()
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return value + slope.square().sum()


def with_auxiliary(model, x):
    loss = classified(model, x)
    return loss + 0.1 * sum(layer.aux_loss for layer in model.layers)


def adversarial(model, x):
    labels, domains = model(x)
    target = torch.arange(len(x), device=x.device)
    return F.cross_entropy(labels, target) + F.cross_entropy(domains, target % 2)


def clicked(model, inputs):
    return F.binary_cross_entropy_with_logits(model(*inputs), (inputs[0].sum(1) > 0).float())


# ---- Hugging Face ------------------------------------------------------------------------------------


def hugging_face(name, **options):
    """Builds the class of that name from its configuration class with these options."""

    def build():
        import transformers

        model_class = getattr(transformers, name)
        return model_class(model_class.config_class(**options))

    return build


def checkpointed(build):
    """Its layers recompute themselves in the backward."""

    def built():
        model = build()
        model.activation_checkpointing_enable()
        return model

    return built


BASE = dict(
    vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=160,
    max_position_embeddings=32,
)  # fmt: skip
LLAMA = dict(**BASE, num_key_value_heads=2)
SMALL = dict(BASE, hidden_size=48, intermediate_size=128)
VISION = dict(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=160, image_size=16, patch_size=8,
)  # fmt: skip
SPEECH = dict(
    vocab_size=32, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=160,
    conv_dim=(32, 32), conv_kernel=(8, 3), conv_stride=(4, 2), num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=4, apply_spec_augment=False, hidden_dropout=0.1, feat_proj_dropout=0.1,
)  # fmt: skip
SEQ2SEQ = dict(
    vocab_size=VOCABULARY, d_model=48, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=32,
)  # fmt: skip
T5 = dict(
    vocab_size=VOCABULARY, d_model=48, d_kv=12, d_ff=128, num_layers=3, num_heads=4, decoder_start_token_id=0,
)  # fmt: skip


def decoder(name, batch=causal_batch, loss=own_loss, **options):
    return Architecture("decoder", hugging_face(name, **options), batch, loss)


def encoder(name, **options):
    return Architecture("encoder", hugging_face(name, **options), masked_batch, own_loss)


def seq2seq(name, batch=translation_batch, **options):
    return Architecture("encoder-decoder", hugging_face(name, **options), batch, own_loss)


def vision(name, batch=image_batch, **options):
    return Architecture("vision", hugging_face(name, **options), batch, own_loss)


def awkward_one(build, batch=vector_batch, loss=classified):
    return Architecture("hand-written", build, batch, loss)


def own_layers(build, batch, loss):
    return Architecture("torch.nn", build, batch, loss)


GPT2 = dict(vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
DECODERS = {
    "gpt2": decoder("GPT2LMHeadModel", **GPT2),
    "gpt2_hidden_losses": decoder("GPT2LMHeadModel", loss=hidden_state_loss, **GPT2),
    "llama": decoder("LlamaForCausalLM", **LLAMA),
    "llama_checkpointed": Architecture(
        "decoder", checkpointed(hugging_face("LlamaForCausalLM", **LLAMA)), causal_batch, own_loss
    ),
    "mistral": decoder("MistralForCausalLM", sliding_window=4, **LLAMA),
    "qwen2": decoder("Qwen2ForCausalLM", **LLAMA),
    "qwen3": decoder("Qwen3ForCausalLM", head_dim=16, **LLAMA),
    "gemma": decoder("GemmaForCausalLM", head_dim=16, **LLAMA),
    "gemma3": decoder(
        "Gemma3ForCausalLM", head_dim=16, sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2,
        **LLAMA,
    ),
    "opt": decoder(
        "OPTForCausalLM", ffn_dim=160, word_embed_proj_dim=32, layerdrop=0.2,
        **{k: v for k, v in BASE.items() if k != "intermediate_size"},
    ),
    "gpt_neox": decoder("GPTNeoXForCausalLM", hidden_dropout=0.1, attention_dropout=0.1, **BASE),
    "phi": decoder("PhiForCausalLM", resid_pdrop=0.1, **BASE),
    "falcon": decoder(
        "FalconForCausalLM", vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        hidden_dropout=0.1, bos_token_id=1, eos_token_id=2,
    ),
    "bloom": decoder(
        "BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=64, n_layer=4, n_head=4, hidden_dropout=0.1,
    ),
    "mamba": Architecture(
        "state space",
        hugging_face("MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=80, num_hidden_layers=4, state_size=4),
        causal_batch, own_loss,
    ),
    "mamba2": Architecture(
        "state space",
        hugging_face(
            "Mamba2ForCausalLM", vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=4, state_size=8,
            num_heads=4, head_dim=32, n_groups=2, chunk_size=4, pad_token_id=0,
        ),
        causal_batch, own_loss,
    ),
    "rwkv": Architecture(
        "state space",
        hugging_face("RwkvForCausalLM", vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=4, context_length=32),
        causal_batch, own_loss,
    ),
    "mixtral": Architecture(
        "mixture of experts",
        hugging_face(
            "MixtralForCausalLM", num_local_experts=4, output_router_logits=True, router_jitter_noise=0.01,
            **dict(LLAMA, hidden_size=48, intermediate_size=64, num_hidden_layers=4),
        ),
        causal_batch, own_loss,
    ),
    "olmoe": Architecture(
        "mixture of experts",
        hugging_face(
            "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2, output_router_logits=True, pad_token_id=1,
            eos_token_id=2, **dict(LLAMA, hidden_size=48, intermediate_size=64),
        ),
        causal_batch, own_loss,
    ),
    "switch": Architecture(
        "mixture of experts",
        hugging_face(
            "SwitchTransformersForConditionalGeneration", num_experts=4, num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1, num_decoder_layers=2, expert_capacity=8, router_jitter_noise=0.01,
            output_router_logits=True, **dict(T5, d_ff=64, num_layers=2),
        ),
        translation_batch, own_loss,
    ),
}  # fmt: skip
ENCODERS = {
    "bert": encoder("BertForMaskedLM", **BASE),
    "roberta": encoder("RobertaForMaskedLM", **BASE),
    "distilbert": encoder(
        "DistilBertForMaskedLM", vocab_size=VOCABULARY, dim=64, hidden_dim=160, n_layers=4, n_heads=4,
        max_position_embeddings=32,
    ),
    "albert": encoder("AlbertForMaskedLM", **dict(
        BASE, hidden_size=72, intermediate_size=180, embedding_size=32, num_hidden_layers=6, num_hidden_groups=3,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )),
    "electra": encoder("ElectraForMaskedLM", embedding_size=32, **BASE),
    "deberta_v2": encoder(
        "DebertaV2ForMaskedLM", relative_attention=True, position_buckets=8, max_relative_positions=16,
        pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", share_att_key=True, conv_kernel_size=3, **SMALL,
    ),
    "modernbert": encoder("ModernBertForMaskedLM", pad_token_id=0, bos_token_id=1, cls_token_id=1, eos_token_id=2,
        sep_token_id=2, attention_dropout=0.1, mlp_dropout=0.1,
        local_attention=4, **BASE),
    "fnet": Architecture(
        "encoder",
        hugging_face("FNetForMaskedLM", **{k: v for k, v in BASE.items() if k != "num_attention_heads"}),
        lambda: {"input_ids": tokens(), "labels": tokens()}, own_loss,
    ),
}  # fmt: skip
ENCODER_DECODERS = {
    "t5": seq2seq("T5ForConditionalGeneration", **T5),
    "bart": seq2seq("BartForConditionalGeneration", encoder_layerdrop=0.2, decoder_layerdrop=0.2, **SEQ2SEQ),
    "t5_padded": seq2seq("T5ForConditionalGeneration", padded_batch, **T5),
    "bart_padded": seq2seq("BartForConditionalGeneration", padded_batch, **SEQ2SEQ),
    "marian": seq2seq("MarianMTModel", pad_token_id=0, decoder_start_token_id=0, **SEQ2SEQ),
}
VISION_MODELS = {
    "vit": vision("ViTForImageClassification", hidden_dropout_prob=0.1, num_labels=10, **VISION),
    "deit": vision("DeiTForImageClassification", hidden_dropout_prob=0.1, num_labels=10, **VISION),
    "beit": vision("BeitForImageClassification", num_labels=10, use_shared_relative_position_bias=True,
        use_mask_token=False, **VISION),
    "dinov2": vision("Dinov2ForImageClassification", num_labels=10, drop_path_rate=0.2, **{
        **{k: v for k, v in VISION.items() if k != "intermediate_size"}, "mlp_ratio": 2}),
    "vit_mae": Architecture(
        "vision",
        hugging_face("ViTMAEForPreTraining", decoder_hidden_size=48, decoder_num_hidden_layers=2,
            decoder_num_attention_heads=4, decoder_intermediate_size=96, **dict(VISION, num_hidden_layers=3)),
        lambda: {"pixel_values": torch.randn(BATCH, 3, 16, 16)}, own_loss,
    ),
    "swin": vision(
        "SwinForImageClassification", num_labels=10, image_size=16, patch_size=4, embed_dim=32, depths=[2, 2],
        num_heads=[2, 4], window_size=2, drop_path_rate=0.2,
    ),
    "convnext": vision("ConvNextForImageClassification", num_labels=10, hidden_sizes=[16, 24, 32, 64],
        depths=[1, 1, 2, 2], patch_size=2, drop_path_rate=0.2),
    "resnet": vision("ResNetForImageClassification", num_labels=10, embedding_size=16, hidden_sizes=[24, 48, 64],
        depths=[2, 2, 1], layer_type="basic"),
    "segformer": vision(  # no map of 1x1: oneDNN's bfloat16 gradient of a strided convolution's weight is garbage there
        "SegformerForSemanticSegmentation", batch=segmentation_batch, num_labels=5, hidden_sizes=[32, 32, 64, 64],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32, mlp_ratios=[2, 2, 2, 2],
        sr_ratios=[4, 2, 1, 1], strides=[4, 2, 1, 1],
    ),
}  # fmt: skip
SPEECH_MODELS = {
    "wav2vec2": Architecture(
        "speech",
        hugging_face("Wav2Vec2ForPreTraining", codevector_dim=32, proj_codevector_dim=32, num_codevectors_per_group=16,
            **SPEECH),
        pretraining_speech_batch, own_loss,
    ),
    "hubert": Architecture("speech", hugging_face("HubertForCTC", **SPEECH), speech_batch, own_loss),
    "hubert_spec_augment": Architecture(
        "speech", hugging_face("HubertForCTC", **dict(SPEECH, apply_spec_augment=True, mask_time_length=2)),
        speech_batch, own_loss,
    ),
    "whisper": Architecture(
        "speech",
        hugging_face(
            "WhisperForConditionalGeneration", num_mel_bins=16, max_source_positions=16, max_target_positions=16,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.1,
            **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
        ),
        whisper_batch, own_loss,
    ),
}  # fmt: skip
TWO_KINDS = dict(
    text_config=dict(SMALL, num_hidden_layers=3, attention_dropout=0.1, bos_token_id=1, eos_token_id=2),
    vision_config=dict(VISION, hidden_size=48, num_hidden_layers=3, intermediate_size=128, attention_dropout=0.1),
)
OTHERS = {
    "clip": Architecture(
        "vision-language", hugging_face("CLIPModel", projection_dim=32, **TWO_KINDS), pair_batch, own_loss
    ),
    "siglip": Architecture("vision-language", hugging_face("SiglipModel", **TWO_KINDS), pair_batch, own_loss),
    "patchtst": Architecture(
        "time series",
        hugging_face(
            "PatchTSTForPrediction", num_input_channels=3, context_length=32, prediction_length=8, patch_length=8,
            patch_stride=8, d_model=48, num_hidden_layers=4, num_attention_heads=4, ffn_dim=128, ff_dropout=0.1,
            attention_dropout=0.1, loss="mse", norm_type="batchnorm",
        ),
        series_batch, own_loss,
    ),
}  # fmt: skip


def llava():
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    vision_config = dict(model_type="clip_vision_model", **dict(VISION, hidden_size=48, intermediate_size=128))
    text_config = dict(model_type="llama", **dict(LLAMA, hidden_size=48, intermediate_size=128))
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision_config, text_config=text_config, image_token_id=2, vision_feature_layer=-2)
    )


OTHERS["llava"] = Architecture("vision-language", llava, image_chat_batch, own_loss)

TORCH = {
    "transformer": own_layers(awkward.Translator, lambda: (tokens(vocabulary=96), tokens(2, 6, 96)), translated),
    "transformer_encoder": own_layers(awkward.Encoder, lambda: torch.randint(0, 128, (4, 8)), classified),
    "lstm": own_layers(awkward.Recurrent, lambda: tokens(vocabulary=64), next_token),
    "gru_packed": own_layers(awkward.Packed, packed_batch, classified),
    "gru_cells": own_layers(awkward.Cells, lambda: tokens(4, 5, 64), next_token),
}
AWKWARD = {
    "cnn_batchnorm": awkward_one(awkward.Convolutions, shaped(2, 3, 8, 8)),
    "cnn_flat": awkward_one(awkward.FlatConvolutions, shaped(2, 3, 8, 8)),
    "inplace_first": awkward_one(awkward.InPlaceFirst),
    "inplace_between": awkward_one(awkward.InPlaceBetween),
    "unet": awkward_one(awkward.UNet, shaped(2, 3, 8, 8), reconstructed),
    "dense": awkward_one(awkward.Dense),
    "class_token": awkward_one(awkward.ClassToken, shaped(2, 3, 8, 8)),
    "tied_by_function": awkward_one(awkward.TiedByFunction, tokens, next_token),
    "tied_parameter": awkward_one(awkward.TiedParameter, tokens, next_token),
    "repeated": awkward_one(awkward.Repeated, shaped(2, 8, awkward.WIDTH)),
    "layer_drop": awkward_one(awkward.LayerDrop),
    "shuffled": awkward_one(awkward.Shuffled),
    "experts": awkward_one(awkward.Experts, shaped(6, awkward.WIDTH)),
    "siamese": awkward_one(awkward.Siamese, loss=contrasted),
    "frozen_prefix": awkward_one(awkward.FrozenPrefix),
    "low_rank": awkward_one(awkward.LowRank),
    "dataclass": awkward_one(awkward.Structured, shaped(2, 8, awkward.WIDTH)),
    "nested": awkward_one(awkward.Nested, shaped(2, 8, awkward.WIDTH)),
    "halting": awkward_one(awkward.Halting, shaped(2, 8, awkward.WIDTH)),
    "reversible": awkward_one(awkward.Reversible),
    "hidden_losses": awkward_one(awkward.HiddenLosses, loss=deeply_supervised),
    "checkpoint": awkward_one(partial(awkward.Checkpointed, use_reentrant=False)),
    "checkpoint_reentrant": awkward_one(partial(awkward.Checkpointed, use_reentrant=True)),
    "checkpoint_outside": awkward_one(awkward.CheckpointedOutside),
    "auxiliary_loss": awkward_one(awkward.AuxiliaryLoss, loss=with_auxiliary),
    "spectral_norm": awkward_one(awkward.SpectralNorm),
    "weight_norm": awkward_one(awkward.WeightNorm),
    "hypernetwork": awkward_one(awkward.Generated),
    "root_buffer": awkward_one(awkward.RootBuffer),
    "recorded": awkward_one(awkward.Recorded),
    "pruned": awkward_one(awkward.Pruned),
    "momentum_contrast": awkward_one(awkward.MomentumContrast, loss=matched),
    "weight_penalty": awkward_one(awkward.TiedParameter, tokens, with_weight_penalty),
    "gradient_penalty": awkward_one(awkward.Siamese, loss=with_gradient_penalty),
    "python_random": awkward_one(awkward.PythonRandom),
    "counting": awkward_one(awkward.Counting),
    "hooked": awkward_one(awkward.Hooked),
    "adversarial": awkward_one(awkward.Adversarial, loss=adversarial),
    "variational": awkward_one(awkward.Variational, loss=evidence_bound),
    "fourier": awkward_one(awkward.Fourier, shaped(2, 8, awkward.WIDTH)),
    "graph": awkward_one(awkward.Graph, graph_batch),
    "recommender": awkward_one(awkward.Recommender, recommender_batch, clicked),
}
ZOO: dict[str, Architecture] = {
    **DECODERS, **ENCODERS, **ENCODER_DECODERS, **VISION_MODELS, **SPEECH_MODELS, **OTHERS, **TORCH, **AWKWARD,
}  # fmt: skip
