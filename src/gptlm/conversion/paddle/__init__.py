"""Checkpoints of PaddleNLP and FleetX."""
