//! How the emulator is compiled: by the build script, and by `build-emulator` for kernels that are
//! not those of this repository.

use std::path::Path;
use std::process::Command;

/// Compiles the emulator with the sources in the folder `kernels` into the program `output`.
/// `kind` is `plain`, `asan` or `tsan`; `headers` are those of the CUDA toolkit, of which nothing
/// else is needed.
pub fn compile(
    kind: &str,
    kernels: &Path,
    headers: &Path,
    triple: &str,
    output: &Path,
) -> Result<(), String> {
    let (runtime, program): (&[&str], &[&str]) = match kind {
        "plain" => (&[], &["-O2"]),
        "asan" => (
            &["-DEMU_ASAN"],
            &[
                "-O1",
                "-fsanitize=address,undefined",
                "-fno-sanitize-recover=all",
                "-fno-omit-frame-pointer",
            ],
        ),
        "tsan" => (&["-DEMU_TSAN"], &["-O1", "-fsanitize=thread"]),
        other => return Err(format!("no such kind of emulator: {other}")),
    };
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").target(triple).host(triple);
    build.opt_level(2).debug(false).cargo_metadata(false);
    let compiler = build.try_get_compiler().map_err(|e| e.to_string())?;
    let command = || {
        let mut command = compiler.to_command();
        // No memcpy made of loops: the run time must not call what a sanitizer intercepts.
        command.args([
            "-fno-strict-aliasing",
            "-g1",
            "-fno-tree-loop-distribute-patterns",
        ]);
        command.arg("-isystem").arg(headers);
        command
    };
    let sources = kernels.join("emulator").join("cpp");
    let object = output.with_extension("runtime.o");
    // The run time itself is never instrumented: it switches stacks.
    run(command()
        .args(runtime)
        .arg("-c")
        .arg(sources.join("runtime.cpp"))
        .arg("-o")
        .arg(&object))?;
    run(command()
        .args(program)
        .arg(sources.join("main.cpp"))
        .arg(&object)
        .arg("-o")
        .arg(output))
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let messages = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command:?} failed:\n{messages}"))
}
