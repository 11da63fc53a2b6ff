"""The commands as Python functions; `gptlm` has their names, imported when they are used."""
