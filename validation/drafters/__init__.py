"""One tiny trained head per drafting method, and the runs of vLLM that it is compared with."""
