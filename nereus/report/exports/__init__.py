"""A global plan as the flags of other systems; what a system cannot express is refused by name, never left out."""
