//! Models by their name on the Hugging Face hub.

use std::{path::PathBuf, sync::mpsc, time::Duration};

use hf_hub::{
    Cache, CacheRepo,
    api::sync::{ApiBuilder, ApiRepo},
};

use super::safetensors::{INDEX_FILE, SINGLE_FILE, shard_names};
use crate::error::{Error, Result};

/// How long the hub may take to answer the first, small request.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Downloaded if the repository has them, before the weights: a folder whose weights are there
/// is complete.
const OPTIONAL: [&str; 4] = [
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
];
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];

/// Whether `id` has the form `owner/name`.
pub fn is_id(id: &str) -> bool {
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    id.split_once('/')
        .is_some_and(|(owner, name)| part(owner) && part(name))
}

/// The local folder of a model: configuration, tokenizer and safetensors weights, from the
/// hub's usual cache (`HF_HOME`) or else downloaded into it from `HF_ENDPOINT`, with a progress
/// bar on stderr if `progress`. A complete cache costs no request.
///
/// # Errors
/// [`Error::ModelNotFound`] if the hub refuses, or does not answer within [`ANSWER_TIMEOUT`];
/// [`Error::Missing`] if the repository lacks a file that is needed.
pub fn fetch(id: &str, progress: bool) -> Result<PathBuf> {
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
    let builder = ApiBuilder::from_env().with_progress(progress);
    fetch_with(id, builder, &Cache::from_env(), ANSWER_TIMEOUT)
}

fn fetch_with(id: &str, builder: ApiBuilder, cache: &Cache, timeout: Duration) -> Result<PathBuf> {
    let cached = cache.model(id.into());
    if let Some(folder) = complete(&cached) {
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
        repo.get(file).map_err(|e| refused(&format!("{file}: {e}")))
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

#[cfg(test)]
mod tests {
    use std::{
        collections::HashMap,
        io::{BufRead, BufReader, Write},
        net::{TcpListener, TcpStream},
        path::Path,
        time::Instant,
    };

    use super::*;

    /// Serves `files` as the hub does: a listing, then ranges with etag and commit.
    fn fake_hub(files: HashMap<&'static str, &'static str>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                serve(stream.unwrap(), &files);
            }
        });
        endpoint
    }

    fn serve(mut stream: TcpStream, files: &HashMap<&str, &str>) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let request = lines.next().unwrap().unwrap();
        let mut range = None;
        for line in lines.map_while(|line| line.ok().filter(|line| !line.is_empty())) {
            if let Some(value) = line.to_lowercase().strip_prefix("range: bytes=") {
                range = Some(value.to_string());
            }
        }
        let path = request.split(' ').nth(1).unwrap();
        let (status, head, body) = match path.rsplit_once("/resolve/main/") {
            None if path == "/api/models/owner/tiny/revision/main" => {
                let names: Vec<_> = files
                    .keys()
                    .map(|name| serde_json::json!({ "rfilename": name }))
                    .collect();
                let listing = serde_json::json!({ "siblings": names, "sha": "c0ffee" });
                ("200 OK", String::new(), listing.to_string())
            }
            Some((_, name)) if files.contains_key(name) => {
                let body = files[name];
                let end = match range.unwrap().as_str() {
                    "0-0" => 1,
                    _ => body.len(),
                };
                let head = format!(
                    "etag: \"{name}\"\r\nx-repo-commit: c0ffee\r\ncontent-range: bytes 0-{}/{}\r\n",
                    end - 1,
                    body.len()
                );
                ("206 Partial Content", head, body[..end].to_string())
            }
            _ => ("404 Not Found", String::new(), String::new()),
        };
        write!(
            stream,
            "HTTP/1.1 {status}\r\n{head}content-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
    }

    fn fetch_from(endpoint: &str, home: &Path, id: &str) -> Result<PathBuf> {
        let cache = Cache::new(home.to_path_buf());
        let builder = ApiBuilder::from_cache(cache.clone())
            .with_endpoint(endpoint.into())
            .with_progress(false);
        fetch_with(id, builder, &cache, Duration::from_secs(5))
    }

    #[test]
    fn downloads_once_and_then_asks_nobody() {
        let home = tempfile::tempdir().unwrap();
        let endpoint = fake_hub(HashMap::from([
            ("config.json", "{}"),
            ("tokenizer.json", "{ }"),
            ("generation_config.json", "{  }"),
            ("pytorch_model.bin", "not wanted"),
            (
                INDEX_FILE,
                r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#,
            ),
            ("model-1.safetensors", "one"),
            ("model-2.safetensors", "two"),
        ]));
        let folder = fetch_from(&endpoint, home.path(), "owner/tiny").unwrap();
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
        assert_eq!(read("config.json"), "{}");
        assert_eq!(read("generation_config.json"), "{  }");
        assert_eq!(read("model-1.safetensors"), "one");
        assert_eq!(read("model-2.safetensors"), "two");
        assert!(!folder.join("pytorch_model.bin").exists());
        let nobody = "http://127.0.0.1:9";
        let again = fetch_from(nobody, home.path(), "owner/tiny").unwrap();
        assert_eq!(again, folder);
    }

    #[test]
    fn a_repository_without_weights_or_without_itself_is_named() {
        let home = tempfile::tempdir().unwrap();
        let endpoint = fake_hub(HashMap::from([
            ("config.json", "{}"),
            ("tokenizer.json", "{}"),
        ]));
        let error = fetch_from(&endpoint, home.path(), "owner/tiny").unwrap_err();
        assert!(
            matches!(&error, Error::Missing { what, .. } if what == INDEX_FILE),
            "{error}"
        );
        let error = fetch_from(&endpoint, home.path(), "owner/other").unwrap_err();
        assert!(
            matches!(&error, Error::ModelNotFound { model, tried }
                if model == "owner/other" && tried.contains("404")),
            "{error}"
        );
    }

    #[test]
    fn a_silent_hub_costs_no_more_than_the_timeout() {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", silent.local_addr().unwrap());
        let home = tempfile::tempdir().unwrap();
        let cache = Cache::new(home.path().to_path_buf());
        let builder = ApiBuilder::from_cache(cache.clone()).with_endpoint(endpoint);
        let start = Instant::now();
        let timeout = Duration::from_millis(300);
        let error = fetch_with("owner/tiny", builder, &cache, timeout).unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(3));
        assert!(
            matches!(&error, Error::ModelNotFound { tried, .. } if tried.contains("no answer")),
            "{error}"
        );
        assert!(ANSWER_TIMEOUT <= Duration::from_secs(10));
    }

    #[test]
    fn hub_ids() {
        for id in ["HuggingFaceTB/SmolLM2-135M-Instruct", "a/b.c_d"] {
            assert!(is_id(id), "{id}");
        }
        for id in ["", "a", "a/", "/b", "a/b/c", "./b", "../b", "a/..", "a/b c"] {
            assert!(!is_id(id), "{id}");
        }
    }
}
