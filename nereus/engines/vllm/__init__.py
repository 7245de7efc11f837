"""Generation by vLLM: one in-process engine part per slot, its weights fed slice by slice from the training layout."""
