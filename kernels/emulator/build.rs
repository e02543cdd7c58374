//! Compiles the emulator with the kernels in it. Needs the headers of a CUDA toolkit (`CUDA_HOME`);
//! without them the crate compiles, and its tests fail with a line that says so.

mod compile;

use std::env;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    // The kernels, and the emulator's own sources among them.
    println!("cargo::rerun-if-changed=..");
    let variable = |name| env::var(name).unwrap_or_default();
    let triple = variable("TARGET");
    println!("cargo::rustc-env=TARGET_TRIPLE={triple}");

    let kind = match (feature("ASAN"), feature("TSAN")) {
        (false, false) => "plain",
        (true, false) => "asan",
        (false, true) => "tsan",
        (true, true) => return println!("cargo::error=one sanitizer at a time"),
    };
    let program = PathBuf::from(variable("OUT_DIR")).join("emulator");
    let headers = PathBuf::from(variable("CUDA_HOME")).join("include");
    if !headers.join("cuda_fp16.h").is_file() {
        println!("cargo::rustc-env=EMULATOR=");
        return println!(
            "cargo::warning=no emulator without the headers of CUDA: CUDA_HOME does not name a toolkit"
        );
    }
    match compile::compile(kind, Path::new(".."), &headers, &triple, &program) {
        Ok(()) => println!("cargo::rustc-env=EMULATOR={}", program.display()),
        Err(message) => message
            .lines()
            .for_each(|line| println!("cargo::error={line}")),
    }
}

fn feature(name: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{name}")).is_some()
}
