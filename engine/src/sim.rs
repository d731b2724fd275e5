//! No model: deterministic tokens, time from a cost model.
