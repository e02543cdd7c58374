//! Stop strings in a stream of text pieces.

/// Finds stop strings that may straddle pieces, and holds back text that may yet turn out to
/// be the start of one.
#[derive(Debug, Clone, Default)]
pub(super) struct StopScanner {
    stops: Vec<String>,
    held: String,
}

impl StopScanner {
    pub(super) fn new(stops: Vec<String>) -> Self {
        Self {
            stops,
            held: String::new(),
        }
    }

    /// Takes a piece of text. Answers the text that can leave, and the stop string that ended
    /// it, if one did: of several, the one that begins first, and the longest of those.
    pub(super) fn push(&mut self, piece: &str) -> (String, Option<String>) {
        self.held.push_str(piece);
        let found = self
            .stops
            .iter()
            .filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)))
            .min_by_key(|(at, stop)| (*at, std::cmp::Reverse(stop.len())));
        if let Some((at, stop)) = found {
            let stop = stop.clone();
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), Some(stop));
        }
        let keep = self
            .held
            .char_indices()
            .map(|(at, _)| at)
            .find(|&at| {
                self.stops
                    .iter()
                    .any(|stop| stop.starts_with(&self.held[at..]))
            })
            .unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// Whether there is anything to find.
    pub(super) fn has_stops(&self) -> bool {
        !self.stops.is_empty()
    }

    /// Whether a stop string would be found if this piece came next.
    pub(super) fn would_stop(&self, piece: &str) -> bool {
        let text = [&self.held, piece].concat();
        self.stops.iter().any(|stop| text.contains(stop.as_str()))
    }

    /// The text that was held back.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<String>) {
        let mut scanner = StopScanner::new(stops.iter().map(|s| s.to_string()).collect());
        let mut out = Vec::new();
        for piece in pieces {
            let (text, stop) = scanner.push(piece);
            out.push(text);
            if stop.is_some() {
                return (out, stop);
            }
        }
        out.push(scanner.finish());
        (out, None)
    }

    #[test]
    fn a_stop_string_may_straddle_pieces() {
        let (out, stop) = scan(&["END"], &["abE", "N", "Dxyz"]);
        assert_eq!(out, ["ab", "", ""]);
        assert_eq!(stop.as_deref(), Some("END"));
    }

    #[test]
    fn text_that_only_began_like_a_stop_string_leaves() {
        let (out, stop) = scan(&["ENDE"], &["E", "N", "EN", "D"]);
        assert_eq!(out, ["", "", "EN", "", "END"]);
        assert_eq!(stop, None);
    }

    #[test]
    fn the_earliest_stop_string_wins_and_characters_stay_whole() {
        let (out, stop) = scan(&["ö!", "ü"], &["aö", "ü"]);
        assert_eq!(out, ["a", "ö"]);
        assert_eq!(stop.as_deref(), Some("ü"));
        let (out, stop) = scan(&["b", "bc"], &["abcd"]);
        assert_eq!((out, stop.as_deref()), (vec!["a".to_string()], Some("bc")));
    }
}
