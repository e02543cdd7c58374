//! Progress bars on stderr. Where it is no terminal nothing is shown.

use candle_paged_attn::load::LoadProgress;
use indicatif::{ProgressBar, ProgressStyle};

const BYTES: &str = "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} ({eta})";
const TENSORS: &str = "{msg} [{wide_bar}] {pos}/{len} tensors";

/// A bar of a download of `total` bytes.
pub fn download(what: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    begin(&bar, what, BYTES);
    bar
}

/// Shows a load: a bar for each file that comes from the hub, and one for the weights.
pub fn loading() -> impl Fn(LoadProgress<'_>) + Send + Sync + 'static {
    let bar = ProgressBar::no_length();
    move |progress| {
        let (what, template, done, total) = match progress {
            LoadProgress::Download { file, bytes, total } => (file, BYTES, bytes, total),
            LoadProgress::Weights { tensors, total } => {
                ("weights", TENSORS, tensors as u64, total as u64)
            }
            _ => return,
        };
        if bar.message() != what {
            bar.reset();
            begin(&bar, what, template);
        }
        bar.set_length(total);
        bar.set_position(done);
        if done == total {
            bar.finish_and_clear();
        }
    }
}

fn begin(bar: &ProgressBar, what: &str, template: &str) {
    let style = ProgressStyle::with_template(template);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message(what.to_string());
}
