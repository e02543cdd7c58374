//! Models by their name on the Hugging Face hub.

use std::{
    path::{Path, PathBuf},
    sync::mpsc,
    time::Duration,
};

use hf_hub::{
    Cache, CacheRepo, Repo, RepoType,
    api::{
        Progress,
        sync::{ApiBuilder, ApiError, ApiRepo},
    },
};

use super::{
    progress::{LoadProgress, Observer},
    safetensors::{INDEX_FILE, SINGLE_FILE, shard_names},
};
use crate::error::{Error, Result};

/// How long the hub may take to answer the first, small request.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Downloaded if the repository has them, before the weights.
const OPTIONAL: [&str; 4] = [
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    LAST_OPTIONAL,
];
/// Nearly every repository has it. A folder with weights and without it was left by a program
/// that did not ask for the optional files, as candle's examples do not.
const LAST_OPTIONAL: &str = "tokenizer_config.json";
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];

/// Whether `id` has the form `owner/name`. A name in `.gguf` is that of a file.
pub fn is_id(id: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    id.split_once('/')
        .is_some_and(|(owner, name)| part(owner) && part(name) && !name.ends_with(".gguf"))
}

/// The local folder of a model: configuration, tokenizer and safetensors weights, from the
/// hub's usual cache (`HF_HOME`) or else downloaded into it from `HF_ENDPOINT`, with the token
/// in `HF_TOKEN` or that of the cache; `observer` is told of each file.
///
/// A complete cache costs no request. One that lacks `tokenizer_config.json` gets those of
/// the optional files (it, `generation_config.json`, the chat template) that the repository
/// has, and is taken as it is if the hub does not answer.
///
/// # Errors
/// [`Error::ModelNotFound`] if the hub refuses, or does not answer within [`ANSWER_TIMEOUT`];
/// [`Error::Missing`] if the repository lacks a file that is needed.
pub fn fetch(id: &str, observer: &Observer) -> Result<PathBuf> {
    let not_found = |tried: &str| Error::ModelNotFound {
        model: id.into(),
        tried: tried.into(),
    };
    if !is_id(id) {
        return Err(not_found("a hub id has the form owner/name"));
    }
    if std::env::var_os("HF_HOME").is_none() && std::env::home_dir().is_none() {
        return Err(not_found("neither HF_HOME nor a home folder is known"));
    }
    let mut builder = ApiBuilder::from_env();
    // hf-hub reads the token of the cache only.
    if let Some(token) = std::env::var("HF_TOKEN").ok().filter(|t| !t.is_empty()) {
        builder = builder.with_token(Some(token));
    }
    fetch_with(id, builder, &Cache::from_env(), ANSWER_TIMEOUT, observer)
}

fn fetch_with(
    id: &str,
    builder: ApiBuilder,
    cache: &Cache,
    timeout: Duration,
    observer: &Observer,
) -> Result<PathBuf> {
    let cached = cache.model(id.into());
    if let Some(folder) = complete(&cached) {
        if !folder.join(LAST_OPTIONAL).exists()
            && let Err(error) = add_optional(id, &folder, builder, timeout, observer)
        {
            tracing::debug!(id, error, "the cache is taken as it is");
        }
        return Ok(folder);
    }
    let refused = |e: &dyn std::fmt::Display| Error::ModelNotFound {
        model: id.into(),
        tried: format!("hub: {e}"),
    };
    let api = builder.build().map_err(|e| refused(&e))?;
    let files = list(api.model(id.into()), timeout).map_err(|e| refused(&e))?;
    let repo = api.model(id.into());
    let get = |file: &str| {
        if !files.iter().any(|listed| listed == file) {
            return Err(Error::Missing {
                place: format!("hub repository {id}"),
                what: file.into(),
            });
        }
        if let Some(path) = cached.get(file) {
            return Ok(path);
        }
        download(&repo, file, observer).map_err(|e| refused(&format!("{file}: {e}")))
    };
    for file in OPTIONAL {
        if files.iter().any(|listed| listed == file) {
            get(file)?;
        }
    }
    for file in NEEDED {
        get(file)?;
    }
    if files.iter().any(|listed| listed == SINGLE_FILE) {
        get(SINGLE_FILE)?;
    } else {
        let mut shards: Vec<String> = shard_names(&get(INDEX_FILE)?)?.into_values().collect();
        shards.sort_unstable();
        shards.dedup();
        for shard in shards {
            get(&shard)?;
        }
    }
    // Files of an older revision may have been in the cache; the folder of the newest one must
    // then have been completed by the last download, or there is nothing consistent to load.
    complete(&cached).ok_or_else(|| refused(&"the repository changed meanwhile; try again"))
}

/// Downloads into a snapshot folder those of [`OPTIONAL`] that it lacks and its revision has.
fn add_optional(
    id: &str,
    folder: &Path,
    builder: ApiBuilder,
    timeout: Duration,
    observer: &Observer,
) -> std::result::Result<(), String> {
    // Not those of `main`, which may have moved on: hf-hub would then look for all files in
    // the folder of the newer revision.
    let commit = folder.file_name().unwrap_or_default().to_string_lossy();
    let revision = Repo::with_revision(id.into(), RepoType::Model, commit.into());
    let api = builder.build().map_err(|e| e.to_string())?;
    let files = list(api.repo(revision.clone()), timeout)?;
    let repo = api.repo(revision);
    for file in OPTIONAL {
        if files.iter().any(|listed| listed == file) && !folder.join(file).exists() {
            download(&repo, file, observer).map_err(|e| format!("{file}: {e}"))?;
        }
    }
    Ok(())
}

/// The snapshot folder if everything that a model needs is in it.
fn complete(cached: &CacheRepo) -> Option<PathBuf> {
    let folder = cached.get("config.json")?.parent()?.to_path_buf();
    let there = |file: &str| folder.join(file).exists();
    let weights = there(SINGLE_FILE)
        || shard_names(&folder.join(INDEX_FILE))
            .is_ok_and(|map| map.values().all(|shard| there(shard)));
    (NEEDED.iter().all(|file| there(file)) && weights).then_some(folder)
}

/// Names of the files in a repository. hf-hub sets no timeout of its own, so the request runs
/// on a thread that is left behind if the hub stays silent.
fn list(repo: ApiRepo, timeout: Duration) -> std::result::Result<Vec<String>, String> {
    let (sender, answer) = mpsc::channel();
    std::thread::spawn(move || {
        // Nobody listens any more after the timeout; that is no error.
        drop(sender.send(repo.info().map_err(|e| e.to_string())));
    });
    let info = answer
        .recv_timeout(timeout)
        .map_err(|_| format!("no answer within {} s", timeout.as_secs_f32()))??;
    Ok(info.siblings.into_iter().map(|f| f.rfilename).collect())
}

fn download(
    repo: &ApiRepo,
    file: &str,
    observer: &Observer,
) -> std::result::Result<PathBuf, ApiError> {
    let download = Download {
        observer,
        file: file.into(),
        bytes: 0,
        total: 0,
    };
    repo.download_with_progress(file, download)
}

/// A file on its way.
struct Download<'a> {
    observer: &'a Observer,
    file: String,
    bytes: u64,
    total: u64,
}

impl Download<'_> {
    fn tell(&self) {
        self.observer.tell(LoadProgress::Download {
            file: &self.file,
            bytes: self.bytes,
            total: self.total,
        });
    }
}

impl Progress for Download<'_> {
    /// hf-hub calls it again when it resumes, and then `update` with what it has already.
    fn init(&mut self, size: usize, _: &str) {
        (self.bytes, self.total) = (0, size as u64);
    }

    fn update(&mut self, size: usize) {
        self.bytes += size as u64;
        self.tell();
    }

    fn finish(&mut self) {}
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashMap,
        io::{self, BufRead, BufReader, Write},
        net::{TcpListener, TcpStream},
        sync::{Arc, Mutex},
        time::Instant,
    };

    use super::*;

    type Outcome = std::result::Result<(), Box<dyn std::error::Error>>;
    type Files = HashMap<&'static str, &'static str>;

    /// Serves `files` as the hub does: a listing, then ranges with etag and commit.
    fn fake_hub(files: Files) -> io::Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let endpoint = format!("http://{}", listener.local_addr()?);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that hangs up finds out by itself.
                drop(serve(stream, &files));
            }
        });
        Ok(endpoint)
    }

    fn serve(mut stream: TcpStream, files: &Files) -> io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let request = lines.next().transpose()?.unwrap_or_default();
        let mut range = None;
        for line in lines.map_while(|line| line.ok().filter(|line| !line.is_empty())) {
            if let Some(value) = line.to_lowercase().strip_prefix("range: bytes=") {
                range = Some(value.to_string());
            }
        }
        let path = request.split(' ').nth(1).unwrap_or_default();
        let file = path
            .rsplit_once("/resolve/main/")
            .or_else(|| path.rsplit_once("/resolve/c0ffee/"))
            .and_then(|(_, name)| files.get_key_value(name));
        let (status, head, body) = match file {
            Some((name, body)) => {
                let end = if range.as_deref() == Some("0-0") {
                    1
                } else {
                    body.len()
                };
                let head = format!(
                    "etag: \"{name}\"\r\nx-repo-commit: c0ffee\r\ncontent-range: bytes 0-{}/{}\r\n",
                    end - 1,
                    body.len()
                );
                let body = body.chars().take(end).collect();
                ("206 Partial Content", head, body)
            }
            None if ["main", "c0ffee"]
                .iter()
                .any(|of| path == format!("/api/models/owner/tiny/revision/{of}")) =>
            {
                let names: Vec<_> = files
                    .keys()
                    .map(|name| serde_json::json!({ "rfilename": name }))
                    .collect();
                let listing = serde_json::json!({ "siblings": names, "sha": "c0ffee" });
                ("200 OK", String::new(), listing.to_string())
            }
            None => ("404 Not Found", String::new(), String::new()),
        };
        write!(
            stream,
            "HTTP/1.1 {status}\r\n{head}content-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        )
    }

    fn fetch_from(endpoint: &str, home: &Path, id: &str, observer: &Observer) -> Result<PathBuf> {
        let cache = Cache::new(home.to_path_buf());
        let builder = ApiBuilder::from_cache(cache.clone()).with_endpoint(endpoint.into());
        fetch_with(id, builder, &cache, Duration::from_secs(5), observer)
    }

    fn sharded() -> Files {
        HashMap::from([
            ("config.json", "{}"),
            ("tokenizer.json", "{ }"),
            ("generation_config.json", "{  }"),
            ("tokenizer_config.json", "{   }"),
            ("pytorch_model.bin", "not wanted"),
            (
                INDEX_FILE,
                r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#,
            ),
            ("model-1.safetensors", "one"),
            ("model-2.safetensors", "two"),
        ])
    }

    #[test]
    fn downloads_once_and_then_asks_nobody() -> Outcome {
        let home = tempfile::tempdir()?;
        let endpoint = fake_hub(sharded())?;
        let nobody = Observer::default();
        let folder = fetch_from(&endpoint, home.path(), "owner/tiny", &nobody)?;
        for (name, content) in [
            ("config.json", "{}"),
            ("generation_config.json", "{  }"),
            ("model-1.safetensors", "one"),
            ("model-2.safetensors", "two"),
        ] {
            assert_eq!(std::fs::read_to_string(folder.join(name))?, content);
        }
        assert!(!folder.join("pytorch_model.bin").exists());
        let hub = TcpListener::bind("127.0.0.1:0")?;
        let endpoint = format!("http://{}", hub.local_addr()?);
        let again = fetch_from(&endpoint, home.path(), "owner/tiny", &nobody)?;
        assert_eq!(again, folder);
        hub.set_nonblocking(true)?;
        assert!(hub.accept().is_err(), "a complete cache asked the hub");
        Ok(())
    }

    /// candle's examples fill the same cache with what they need.
    #[test]
    fn a_cache_without_the_optional_files_gets_them_when_the_hub_answers() -> Outcome {
        let mut files = sharded();
        let optional = ["generation_config.json", "tokenizer_config.json"];
        files.retain(|name, _| !optional.contains(name));
        let home = tempfile::tempdir()?;
        let fetch =
            |endpoint: &str| fetch_from(endpoint, home.path(), "owner/tiny", &Observer::default());
        let folder = fetch(&fake_hub(files)?)?;
        let unreachable = "http://127.0.0.1:9";
        assert_eq!(fetch(unreachable)?, folder);
        assert_eq!(fetch(&fake_hub(sharded())?)?, folder);
        for name in optional {
            let content = std::fs::read_to_string(folder.join(name))?;
            assert_eq!(Some(&content.as_str()), sharded().get(name), "{name}");
        }
        assert_eq!(fetch(unreachable)?, folder);
        Ok(())
    }

    #[test]
    fn an_observer_is_told_of_every_file_from_nothing_to_all() -> Outcome {
        let told: Arc<Mutex<Vec<(String, u64, u64)>>> = Arc::default();
        let log = told.clone();
        let observer = Observer::new(move |progress| {
            if let LoadProgress::Download { file, bytes, total } = progress
                && let Ok(mut log) = log.lock()
            {
                log.push((file.to_string(), bytes, total));
            }
        });
        let home = tempfile::tempdir()?;
        let endpoint = fake_hub(sharded())?;
        fetch_from(&endpoint, home.path(), "owner/tiny", &observer)?;
        let told = std::mem::take(&mut *told.lock().map_err(|e| e.to_string())?);
        for (name, content) in sharded() {
            let len = content.len() as u64;
            let of_file: Vec<_> = told.iter().filter(|(file, ..)| file == name).collect();
            if name == "pytorch_model.bin" {
                assert!(of_file.is_empty(), "{of_file:?}");
                continue;
            }
            let first = of_file.first().map(|(_, bytes, total)| (*bytes, *total));
            let last = of_file.last().map(|(_, bytes, total)| (*bytes, *total));
            assert_eq!((first, last), (Some((0, len)), Some((len, len))), "{name}");
            assert!(
                of_file.is_sorted_by_key(|(_, bytes, _)| *bytes),
                "{of_file:?}"
            );
        }
        Ok(())
    }

    #[test]
    fn a_repository_without_weights_or_without_itself_is_named() -> Outcome {
        let home = tempfile::tempdir()?;
        let endpoint = fake_hub(HashMap::from([
            ("config.json", "{}"),
            ("tokenizer.json", "{}"),
        ]))?;
        let fetch = |id| fetch_from(&endpoint, home.path(), id, &Observer::default());
        let missing = fetch("owner/tiny");
        assert!(
            matches!(&missing, Err(Error::Missing { what, .. }) if what == INDEX_FILE),
            "{missing:?}"
        );
        let nowhere = fetch("owner/other");
        assert!(
            matches!(&nowhere, Err(Error::ModelNotFound { model, tried })
                if model == "owner/other" && tried.contains("404")),
            "{nowhere:?}"
        );
        Ok(())
    }

    #[test]
    fn a_silent_hub_costs_no_more_than_the_timeout() -> Outcome {
        let silent = TcpListener::bind("127.0.0.1:0")?;
        let endpoint = format!("http://{}", silent.local_addr()?);
        let home = tempfile::tempdir()?;
        let cache = Cache::new(home.path().to_path_buf());
        let builder = ApiBuilder::from_cache(cache.clone()).with_endpoint(endpoint);
        let start = Instant::now();
        let timeout = Duration::from_millis(300);
        let result = fetch_with("owner/tiny", builder, &cache, timeout, &Observer::default());
        assert!(start.elapsed() < Duration::from_secs(3));
        assert!(
            matches!(&result, Err(Error::ModelNotFound { tried, .. }) if tried.contains("no answer")),
            "{result:?}"
        );
        assert!(ANSWER_TIMEOUT <= Duration::from_secs(10));
        Ok(())
    }

    #[test]
    fn hub_ids() {
        for id in ["HuggingFaceTB/SmolLM2-135M-Instruct", "a/b.c_d"] {
            assert!(is_id(id), "{id}");
        }
        for id in [
            "", "a", "a/", "/b", "a/b/c", "./b", "../b", "a/..", "a/b c", "a/b.gguf",
        ] {
            assert!(!is_id(id), "{id}");
        }
    }
}
