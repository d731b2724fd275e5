//! A model on the CPU.
