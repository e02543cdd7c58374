//! Compiles an emulator of other kernels than the repository's own, such as those with planted
//! faults: `build-emulator plain|asan|tsan KERNELS_FOLDER OUTPUT`. `CUDA_HOME` names the toolkit.

#[path = "../../compile.rs"]
mod compile;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (Ok(toolkit), [kind, kernels, output]) = (std::env::var("CUDA_HOME"), &args[..]) else {
        eprintln!("CUDA_HOME=TOOLKIT build-emulator plain|asan|tsan KERNELS_FOLDER OUTPUT");
        return ExitCode::from(2);
    };
    let headers = Path::new(&toolkit).join("include");
    let triple = env!("TARGET_TRIPLE");
    match compile::compile(
        kind,
        Path::new(kernels),
        &headers,
        triple,
        Path::new(output),
    ) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}
