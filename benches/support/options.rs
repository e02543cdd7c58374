//! The options that the benches have in common.

use std::path::PathBuf;

/// To be flattened into a bench's own.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Threads of both sides.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: u16,
    /// Only rows whose name contains this.
    #[arg(long, default_value = "")]
    pub only: String,
    /// Writes the rows to this file as JSON.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Passed by `cargo bench`. Without it (`cargo test --all-targets`) nothing is measured.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    /// Whether to measure; says so if not.
    pub fn measure(&self, bench: &str) -> bool {
        if !self.bench {
            println!("nothing measured: run `cargo bench --bench {bench}`");
        }
        self.bench
    }
}
