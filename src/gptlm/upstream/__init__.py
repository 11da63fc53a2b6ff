"""Every use of private names of torch, DeepSpeed, accelerate and transformers, one module per library."""
