"""Arguments, defaults and log lines of PaddleNLP, FleetX, Megatron-LM, OneFlow, transformers and TRL."""
