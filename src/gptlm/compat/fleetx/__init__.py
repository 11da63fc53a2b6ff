"""FleetX's YAML files: loading, checking and translating them."""
