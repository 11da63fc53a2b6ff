"""Names of optimizers and schedules, those of transformers included."""

ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused")
ELEMENTWISE = ("sgd", "rmsprop")  # besides AdamW: their state fits any part of a flattened tensor
BITSANDBYTES = (
    "adamw_8bit", "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion", "lion_32bit", "lion_8bit", "rmsprop_bnb",
    "rmsprop_bnb_8bit", "rmsprop_bnb_32bit",
)  # fmt: skip
NO_SAVED_STATE = "keeps a state that checkpoints cannot hold"
NOT_OFFERED = {
    **dict.fromkeys(
        ("paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit",
         "paged_lion_8bit"),
        "its paged state cannot be restored from checkpoints; use the same one without paged_",
    ),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), f"{NO_SAVED_STATE}; use adamw_8bit"),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
                    "trains and evaluates with different weights; use adamw with --lr_scheduler_type constant"),
    **dict.fromkeys(("lomo", "adalomo"), "updates during the backward pass, without accumulation; use adafactor"),
    **dict.fromkeys(
        ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise",
         "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "apollo_adamw", "apollo_adamw_layerwise"),
        f"{NO_SAVED_STATE}, its projections; use adafactor, or --lora in fine-tuning",
    ),
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused"), "is for other devices; use adamw"),
    **dict.fromkeys(("adamw_anyprecision", "grokadamw", "stable_adamw"), "is not tested here; use adamw"),
}  # fmt: skip
OPTIMIZERS = (*ADAMW, "adafactor", "adagrad", "muon", *ELEMENTWISE, *BITSANDBYTES, *NOT_OFFERED)

OWN_SCHEDULES = ("linear", "cosine", "oneflow_cosine", "constant", "constant_with_warmup", "polynomial")
STOCK_SCHEDULES = (
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "inverse_sqrt",
    "warmup_stable_decay",
)
NO_SCHEDULES = ("reduce_lr_on_plateau", "greedy")  # they follow the losses
