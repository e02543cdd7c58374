//! How an example ends.

use std::process::ExitCode;

/// What `main` answers: an error is one line on stderr, without the backtrace that `main` would
/// print of it where `RUST_BACKTRACE` is set.
pub fn exit(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
