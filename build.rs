//! Compiles `kernels/paged_attn.cu` for the feature `cuda`; without it, does nothing.
//!
//! The result is a fatbin of machine code for several architectures, and of PTX for the GPUs
//! between and after them, which `src/ops/cuda/` embeds. Nothing is downloaded.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compute capabilities to compile for, as far as the compiler knows them. 8.0 is the first
/// with `cp.async` and bf16 tensor cores.
const DEFAULT_CAPS: [u32; 6] = [80, 86, 89, 90, 100, 120];
const MIN_CAP: u32 = 80;

const FLAGS: [&str; 4] = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-fatbin"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed=kernels");
    if let Err(message) = compile() {
        for line in format!("feature `cuda`: {message}").lines() {
            println!("cargo::error={line}");
        }
    }
}

fn compile() -> Result<(), String> {
    let nvcc = find_nvcc()?;
    let caps = capabilities(&known_capabilities(&nvcc)?)?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    run(Command::new(&nvcc)
        .args(FLAGS)
        // One job per architecture.
        .args(["--threads", "0"])
        .args(caps.iter().map(|cap| code(*cap, "sm")))
        .args(caps.first().map(|cap| code(*cap, "compute")))
        .arg("-o")
        .arg(out.join("paged_attn.fatbin"))
        .arg("kernels/paged_attn.cu"))?;
    Ok(())
}

fn code(cap: u32, kind: &str) -> String {
    format!("-gencode=arch=compute_{cap},code={kind}_{cap}")
}

/// nvcc itself in `NVCC`, or a toolkit in `CUDA_HOME`, `CUDA_PATH` or `CUDA_ROOT`, or on the
/// `PATH`, or where its installer puts it.
fn find_nvcc() -> Result<PathBuf, String> {
    let name = format!("nvcc{}", env::consts::EXE_SUFFIX);
    let mut candidates = Vec::new();
    for variable in ["NVCC", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"] {
        println!("cargo::rerun-if-env-changed={variable}");
        if let Some(value) = env::var_os(variable).map(PathBuf::from) {
            candidates.push(match variable {
                "NVCC" => value,
                _ => value.join("bin").join(&name),
            });
        }
    }
    if let Some(path) = env::var_os("PATH") {
        candidates.extend(env::split_paths(&path).map(|folder| folder.join(&name)));
    }
    candidates.push(Path::new("/usr/local/cuda/bin").join(&name));
    let found = candidates.into_iter().find(|path| path.is_file());
    found.ok_or_else(|| {
        "nvcc not found: install the CUDA toolkit and set NVCC to the compiler \
         or CUDA_HOME to the toolkit, or put nvcc on the PATH"
            .into()
    })
}

/// Capabilities that this compiler can make code for.
fn known_capabilities(nvcc: &Path) -> Result<Vec<u32>, String> {
    let output = run(Command::new(nvcc).arg("--list-gpu-arch"))?;
    let known = output.split_whitespace();
    Ok(known
        .filter_map(|arch| arch.strip_prefix("compute_")?.parse().ok())
        .collect())
}

/// The capabilities of `CUDA_COMPUTE_CAP` ("90", "8.6", "80,90"), else the default ones.
fn capabilities(known: &[u32]) -> Result<Vec<u32>, String> {
    println!("cargo::rerun-if-env-changed=CUDA_COMPUTE_CAP");
    let Ok(wanted) = env::var("CUDA_COMPUTE_CAP") else {
        let caps = DEFAULT_CAPS.iter().filter(|cap| known.contains(cap));
        return Ok(caps.copied().collect());
    };
    let mut caps = Vec::new();
    for word in wanted
        .split([',', ';', ' '])
        .filter(|word| !word.is_empty())
    {
        // No kernel uses what a suffix (90a, 100f) would unlock.
        let digits = word.replace('.', "");
        let cap = digits.trim_end_matches(['a', 'f']).parse().ok();
        match cap.filter(|cap| *cap >= MIN_CAP && known.contains(cap)) {
            Some(cap) => caps.push(cap),
            None => {
                let known = known.iter().filter(|cap| **cap >= MIN_CAP);
                return Err(format!(
                    "CUDA_COMPUTE_CAP={wanted}: {word} is not one of {:?}, the capabilities from \
                     8.0 on that this nvcc knows",
                    known.collect::<Vec<_>>()
                ));
            }
        }
    }
    caps.sort_unstable();
    caps.dedup();
    if caps.is_empty() {
        return Err("CUDA_COMPUTE_CAP is empty".into());
    }
    Ok(caps)
}

/// Runs a command and returns what it printed; its messages if it fails.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command
        .output()
        .map_err(|e| format!("{}: {e}", command.get_program().display()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!(
        "{command:?} failed:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    ))
}
