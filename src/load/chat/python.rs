//! What templates expect of Python: the functions and filters that transformers adds to Jinja.

use std::{
    io,
    time::{SystemTime, UNIX_EPOCH},
};

use minijinja::{
    Error, ErrorKind,
    value::{Kwargs, Value},
};
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter, Serializer};

/// Ends rendering with the template's own message.
pub(super) fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// The time now, in UTC, by a `strftime` format.
pub(super) fn strftime_now(format: String) -> Result<String, Error> {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    strftime(&format, seconds)
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it. Jinja's own filter
/// escapes `<`, `>`, `&` and `'` for HTML, which no model was trained on.
pub(super) fn tojson(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let bad = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut out = Limited(Vec::new());
    match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)),
        Some(n) => {
            let indent = vec![b' '; n.min(16)];
            let pretty = PrettyFormatter::with_indent(&indent);
            value.serialize(&mut Serializer::with_formatter(&mut out, pretty))
        }
    }
    .map_err(bad)?;
    String::from_utf8(out.0).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

/// Bytes of JSON of one value: a list that holds a list twice, and that another twice, is
/// short to build and long to write.
const MAX_JSON: usize = 16 << 20;

/// Takes at most [`MAX_JSON`] bytes.
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_JSON {
            return Err(io::Error::other(format!("more than {MAX_JSON} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Python's separators: a space after each comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        separate(w, first)
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        separate(w, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        CompactFormatter.begin_object_value(w)?;
        w.write_all(b" ")
    }
}

fn separate<W: ?Sized + io::Write>(w: &mut W, first: bool) -> io::Result<()> {
    if first { Ok(()) } else { w.write_all(b", ") }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// Formats seconds since 1970, UTC. Knows the directives that stand for one number or name.
fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    let (year, month, day) = date(days);
    let name = |names: &[&'static str], n: u64| names.get(n as usize).copied().unwrap_or_default();
    let (month_name, day_name) = (name(&MONTHS, month), name(&DAYS, days % 7));
    let short = |name: &str| name.chars().take(3).collect::<String>();
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        out.push_str(&match chars.next() {
            Some('Y') => year.to_string(),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{:02}", month + 1),
            Some('B') => month_name.to_string(),
            Some('b') => short(month_name),
            Some('d') => format!("{day:02}"),
            Some('e') => format!("{day:2}"),
            Some('A') => day_name.to_string(),
            Some('a') => short(day_name),
            Some('H') => format!("{hour:02}"),
            Some('I') => format!("{:02}", (hour + 11) % 12 + 1),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_string(),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{second:02}"),
            Some('%') => "%".to_string(),
            other => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!(
                        "strftime_now: unsupported directive %{}",
                        other.map_or(String::new(), String::from)
                    ),
                ));
            }
        });
    }
    Ok(out)
}

/// Year, month from 0 and day from 1 of a day counted from 1970-01-01, Gregorian.
fn date(mut days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| {
        (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400)
    };
    let mut year = 1970;
    loop {
        let length = 365 + u64::from(leap(year));
        if days < length {
            break;
        }
        days -= length;
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 0;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values from `date -u -d @SECONDS`.
    #[test]
    fn dates() -> Result<(), Error> {
        let all = "%A %a %d %e %B %b %m %Y %y %H %I %p %M %S %%";
        for (seconds, expected) in [
            (
                0,
                "Thursday Thu 01  1 January Jan 01 1970 70 00 12 AM 00 00 %",
            ),
            (
                951_782_399,
                "Monday Mon 28 28 February Feb 02 2000 00 23 11 PM 59 59 %",
            ),
            (
                951_782_400,
                "Tuesday Tue 29 29 February Feb 02 2000 00 00 12 AM 00 00 %",
            ),
            (
                1_735_689_599,
                "Tuesday Tue 31 31 December Dec 12 2024 24 23 11 PM 59 59 %",
            ),
            (
                4_107_542_400,
                "Monday Mon 01  1 March Mar 03 2100 00 00 12 AM 00 00 %",
            ),
        ] {
            assert_eq!(strftime(all, seconds)?, expected);
        }
        assert!(strftime("%Q", 0).is_err());
        assert!(strftime("%", 0).is_err());
        Ok(())
    }
}
