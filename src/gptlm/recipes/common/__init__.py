"""Steps that several commands share."""
