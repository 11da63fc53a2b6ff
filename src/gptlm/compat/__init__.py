"""What other communities typed: aliases, defaults and log lines of PaddleNLP, FleetX, Megatron-LM and others."""
