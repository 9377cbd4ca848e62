"""Networks for images, from transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from tests.exports.architecture import Architecture, calling, ids, made, mask, normal

IMAGES = {"batch": (2, 3), "height": (64, 96), "width": (64, 64)}
VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
CLIP_TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 20,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 99,
}
STAGES: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [16, 24, 32], "depths": [1, 1, 2]}
DETR: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_queries": 6,
    "num_labels": 4,
}
SAM_PROMPT: dict[str, Any] = {"hidden_size": 32, "image_size": 64, "patch_size": 16, "mask_input_channels": 4}
SAM_MASKS: dict[str, Any] = {
    "hidden_size": 32,
    "mlp_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "attention_downsample_rate": 2,
    "iou_head_hidden_dim": 16,
}


def image(
    model: Callable[[], nn.Module], result: str = "last_hidden_state", *more: str, fixed: int = 0
) -> Architecture:
    """Reads images, which are `fixed` high and wide, or of open size."""
    dims = ("batch", 3, fixed, fixed) if fixed else ("batch", 3, "height", "width")
    sizes: Mapping[str, tuple[int, int]] = {"batch": (2, 3)} if fixed else IMAGES
    return calling(model, {"pixel_values": normal(*dims)}, [result, *more], sizes)


def clip() -> nn.Module:
    import transformers

    config = transformers.CLIPConfig(text_config=CLIP_TEXT, vision_config=VIT, projection_dim=24)
    return transformers.CLIPModel(config)


def detr() -> nn.Module:
    import transformers

    stages = transformers.ResNetConfig(**STAGES, out_features=["stage3"])
    config = transformers.DetrConfig(
        **DETR, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=stages
    )
    return transformers.DetrForObjectDetection(config)


def sam() -> nn.Module:
    import transformers

    vision = {
        **VIT,
        "image_size": 64,
        "patch_size": 16,
        "output_channels": 32,
        "mlp_dim": 48,
        "window_size": 3,
        "global_attn_indexes": [1],
        "num_pos_feats": 16,
        "attn_implementation": "eager",
    }
    config = transformers.SamConfig(
        attn_implementation="eager",
        vision_config=vision,
        prompt_encoder_config=SAM_PROMPT,
        mask_decoder_config=SAM_MASKS,
    )
    return transformers.SamModel(config)


IMAGE_NETWORKS = {
    "vit": image(made("ViTModel", "ViT", **VIT), fixed=32),
    "deit": image(made("DeiTModel", "DeiT", **VIT), fixed=32),
    "dinov2": image(made("Dinov2Model", "Dinov2", **VIT), fixed=32),
    "swin": image(
        made(
            "SwinModel",
            "Swin",
            image_size=32,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            attn_implementation="eager",
        ),
        fixed=32,
    ),
    "convnext": image(made("ConvNextModel", "ConvNext", hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 2, 1])),
    "resnet": image(made("ResNetModel", "ResNet", **STAGES), "last_hidden_state", "pooler_output"),
    "regnet": image(made("RegNetModel", "RegNet", **STAGES, groups_width=8, layer_type="y")),
    "mobilenet_v2": image(
        made(
            "MobileNetV2Model",
            "MobileNetV2",
            depth_multiplier=0.25,
            depth_divisible_by=4,
            min_depth=4,
            finegrained_output=False,
        )
    ),
    "mobilevit": image(
        made(
            "MobileViTModel",
            "MobileViT",
            hidden_sizes=[16, 24, 32],
            num_attention_heads=2,
            neck_hidden_sizes=[8, 8, 12, 16, 20, 24, 24],
            image_size=64,
        ),
        fixed=64,
    ),
    "efficientnet": image(
        made(
            "EfficientNetModel",
            "EfficientNet",
            width_coefficient=0.25,
            depth_coefficient=0.25,
            hidden_dim=320,
        )
    ),
    "segformer": image(
        made(
            "SegformerForSemanticSegmentation",
            "Segformer",
            hidden_sizes=[8, 16, 24, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 4],
            decoder_hidden_size=16,
            sr_ratios=[8, 4, 2, 1],
            num_labels=5,
        ),
        "logits",
    ),
    "yolos": image(
        made(
            "YolosForObjectDetection",
            "Yolos",
            **{**VIT, "image_size": [64, 64], "patch_size": 16},
            num_detection_tokens=6,
            num_labels=4,
        ),
        "logits",
        "pred_boxes",
        fixed=64,
    ),
    "detr": image(detr, "logits", "pred_boxes", fixed=64),
    "sam": calling(
        sam,
        {"pixel_values": normal("batch", 3, 64, 64), "input_points": normal("batch", 1, "points", 2)},
        ["pred_masks", "iou_scores"],
        {"batch": (1, 2), "points": (2, 3)},
    ),
    "clip": calling(
        clip,
        {
            "input_ids": ids(99, "texts", "sequence"),
            "pixel_values": normal("images", 3, 32, 32),
            "attention_mask": mask("texts", "sequence"),
        },
        ["logits_per_image", "text_embeds", "image_embeds"],
        {"texts": (2, 3), "sequence": (7, 9), "images": (2, 4)},
    ),
    "clip_vision": image(made("CLIPVisionModel", "CLIPVision", **VIT), "pooler_output", fixed=32),
    "dpt": image(
        made(
            "DPTForDepthEstimation",
            "DPT",
            **{**VIT, "num_hidden_layers": 4},
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 12, 16, 20],
            fusion_hidden_size=8,
        ),
        "predicted_depth",
        fixed=32,
    ),
}
