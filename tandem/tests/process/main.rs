//! The binary as a process of its own.

mod canary;
mod command_line;
mod up;
