"""Additional checks on files of the originals, vocabularies and texts, which this repository does not hold."""
