//! The binary: reads the command line, runs its subcommand, and turns the result into an exit code.
//!
//! 0: success. 1: failure, with one line on stderr that says what to do. 2: the command line or a setting is wrong.

use std::process::ExitCode;
use tandem::cli::Cli;
use tandem_process::retry::error_chain;

/// Takes less CPU than the system's allocator and returns the memory of a burst to the system (docs/adr/040-edge-cpu.md).
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let cli = match Cli::read(std::env::args_os().collect(), std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT")) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    match tandem::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tandem::print_error(&error_chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}
