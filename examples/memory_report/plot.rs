//! The report as a picture: a bar for each row, and beside it how many requests ran at once.

use anyhow::{Error, Result};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::report::{Report, Row};

const WIDTH: i32 = 960;
const LEFT: i32 = 170;
const TOP: i32 = 112;
const BAR: i32 = 18;
const STEP: i32 = 25;
/// Between policies.
const GAP: i32 = 12;
/// Widths of the two panels.
const SHARE: i32 = 470;
const COUNT: i32 = 200;
const COUNT_LEFT: i32 = LEFT + SHARE + 60;

const TOKENS: RGBColor = RGBColor(38, 112, 148);
const RESERVED: RGBColor = RGBColor(240, 190, 90);
const INTERNAL: RGBColor = RGBColor(208, 100, 66);
const EXTERNAL: RGBColor = RGBColor(150, 150, 156);
const INK: RGBColor = RGBColor(40, 40, 46);
const FAINT: RGBColor = RGBColor(222, 222, 226);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The picture, as the text of an SVG file.
pub fn svg(report: &Report) -> Result<String> {
    let places = places(&report.rows);
    let bottom = places.last().map_or(TOP, |y| y + BAR) + 8;
    let mut text = String::new();
    {
        let size = (WIDTH as u32, bottom as u32 + 46);
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        draw(&area, report, &places, bottom).and_then(|()| area.present().map_err(drawing))?;
    }
    Ok(text)
}

/// Upper edges of the bars.
fn places(rows: &[Row]) -> Vec<i32> {
    let mut y = TOP;
    let mut places = Vec::with_capacity(rows.len());
    for (i, row) in rows.iter().enumerate() {
        let before = i.checked_sub(1).map(|i| &rows[i]);
        if before.is_some_and(|before| before.policy != row.policy && row.block_size.is_some()) {
            y += GAP;
        }
        places.push(y);
        y += STEP;
    }
    places
}

fn draw(area: &Area, report: &Report, places: &[i32], bottom: i32) -> Result<()> {
    area.fill(&WHITE).map_err(drawing)?;
    let title = "Share of the KV memory in use that holds tokens";
    write(area, title, (24, 22), 20, INK, HPos::Left)?;
    let about = format!(
        "{}: {} requests; time average; memory of {} tokens",
        report.trace, report.requests, report.memory_tokens
    );
    write(area, &about, (24, 46), 13, INK, HPos::Left)?;
    legend(area)?;

    // Scales.
    let most = report.rows.iter().map(|row| row.shares.concurrent);
    let most = most.fold(1.0, f64::max);
    for percent in [0, 25, 50, 75, 100] {
        let x = LEFT + SHARE * percent / 100;
        line(area, x, bottom)?;
        let label = format!("{percent} %");
        write(area, &label, (x, bottom + 14), 12, INK, HPos::Center)?;
    }
    let step = nice_step(most);
    for tick in 0..=(most / step) as i32 {
        let value = f64::from(tick) * step;
        let x = COUNT_LEFT + (f64::from(COUNT) * value / most) as i32;
        line(area, x, bottom)?;
        write(
            area,
            &format!("{value}"),
            (x, bottom + 14),
            12,
            INK,
            HPos::Center,
        )?;
    }
    let heading = "Requests at once";
    write(area, heading, (COUNT_LEFT, 92), 13, INK, HPos::Left)?;

    for (row, &y) in report.rows.iter().zip(places) {
        let middle = y + BAR / 2;
        write(
            area,
            &row.label(),
            (LEFT - 12, middle),
            13,
            INK,
            HPos::Right,
        )?;
        let shares = &row.shares;
        let parts = [
            (shares.utilization, TOKENS),
            (shares.reserved_waste, RESERVED),
            (shares.internal_waste, INTERNAL),
            (shares.external_waste, EXTERNAL),
        ];
        let mut from = 0.0;
        for (share, colour) in parts {
            let x = |share: f64| LEFT + (share * f64::from(SHARE)).round() as i32;
            bar(area, x(from), x(from + share), y, colour)?;
            from += share;
        }
        let percent = format!("{:.1} %", 100.0 * shares.utilization);
        let wide = shares.utilization > 0.15;
        let (x, colour) = match wide {
            true => (LEFT + 8, WHITE),
            false => (
                LEFT + (shares.utilization * f64::from(SHARE)) as i32 + 8,
                INK,
            ),
        };
        write(area, &percent, (x, middle), 12, colour, HPos::Left)?;

        let end = COUNT_LEFT + (f64::from(COUNT) * shares.concurrent / most) as i32;
        bar(area, COUNT_LEFT, end, y, TOKENS)?;
        let count = format!("{:.0}", shares.concurrent);
        write(area, &count, (end + 6, middle), 12, INK, HPos::Left)?;
    }
    Ok(())
}

fn legend(area: &Area) -> Result<()> {
    let entries = [
        (TOKENS, "tokens", 70),
        (RESERVED, "reserved for later", 132),
        (INTERNAL, "never filled", 96),
        (EXTERNAL, "scattered holes", 0),
    ];
    let mut x = LEFT;
    for (colour, label, width) in entries {
        let square = Rectangle::new([(x, 86), (x + 12, 98)], colour.filled());
        area.draw(&square).map_err(drawing)?;
        write(area, label, (x + 18, 92), 13, INK, HPos::Left)?;
        x += 18 + width;
    }
    Ok(())
}

/// 1, 2 or 5 times a power of ten, for about four steps to `most`.
fn nice_step(most: f64) -> f64 {
    let power = 10f64.powf((most / 4.0).log10().floor()).max(1.0);
    let steps = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    steps
        .into_iter()
        .find(|step| most / step <= 5.0)
        .unwrap_or(10.0 * power)
}

fn bar(area: &Area, from: i32, to: i32, y: i32, colour: RGBColor) -> Result<()> {
    if from == to {
        return Ok(());
    }
    let bar = Rectangle::new([(from, y), (to, y + BAR)], colour.filled());
    area.draw(&bar).map_err(drawing)
}

fn line(area: &Area, x: i32, bottom: i32) -> Result<()> {
    let line = PathElement::new(vec![(x, TOP - 6), (x, bottom)], FAINT);
    area.draw(&line).map_err(drawing)
}

/// A text whose middle is at the height of `at`.
fn write(
    area: &Area,
    text: &str,
    at: (i32, i32),
    size: i32,
    colour: RGBColor,
    side: HPos,
) -> Result<()> {
    // The backend writes sizes divided by 1.24, the usual ratio of a line to its letters.
    let size = 1.24 * f64::from(size);
    let style = ("sans-serif", size).into_font().color(&colour);
    let style = style.pos(Pos::new(side, VPos::Center));
    area.draw(&Text::new(text.to_string(), at, style))
        .map_err(drawing)
}

fn drawing(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(error).context("cannot draw")
}
