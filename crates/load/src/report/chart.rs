//! Computes charts: turns figures into coordinates of an SVG of a fixed size, which the page's template draws.

use super::format::decimal;
use serde::Serialize;

/// The size of a chart, in SVG units.
const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 68.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 26.0;
/// The number of horizontal grid lines above the bottom line.
const TICKS: u32 = 4;
/// A line with at most this many points shows a dot at each point.
const DOTS_MAX: usize = 24;
/// The number of line colours that the page defines.
pub(super) const COLOURS: usize = 8;

/// A chart whose positions are SVG coordinates.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Chart {
    title: String,
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    rows: Vec<Tick>,
    columns: Vec<Tick>,
    lines: Vec<ChartLine>,
}

/// A labelled mark on an axis.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Tick {
    at: f64,
    text: String,
    anchor: &'static str,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct ChartLine {
    name: String,
    colour: usize,
    dashed: bool,
    path: String,
    dots: Vec<(f64, f64)>,
}

/// A line of a chart.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) name: String,
    /// The index of the report to which the line belongs. It selects the colour.
    pub(super) report: usize,
    pub(super) dashed: bool,
    /// Pairs of x and y in ascending order of x.
    pub(super) points: Vec<(f64, f64)>,
}

/// The horizontal axis: its marks, each with a position and a label. The first and the last mark are the ends of the axis.
pub(super) struct Axis(pub(super) Vec<(f64, String)>);

impl Axis {
    /// Returns an axis in seconds from 0 to `to`.
    pub(super) fn seconds(to: f64) -> Self {
        let text = |seconds: f64| format!("{} s", decimal(seconds).trim_end_matches(".00").trim_end_matches(".0"));
        Self(vec![(0.0, "0 s".to_owned()), (to / 2.0, text(to / 2.0)), (to, text(to))])
    }

    /// Returns an axis of percentiles, whose positions [`percentile_at`] computes.
    pub(super) fn percentiles() -> Self {
        let marks = [(0.0, "0"), (50.0, "p50"), (90.0, "p90"), (99.0, "p99"), (100.0, "max")];
        Self(marks.map(|(percent, text)| (percentile_at(percent), text.to_owned())).to_vec())
    }
}

/// Returns the position of a percentile. The distances from p0 to p90, from p90 to p99 and from p99 to p99.9 are equal.
pub(super) fn percentile_at(percent: f64) -> f64 {
    -(1.0 - percent / 100.0).max(10_f64.powf(-3.4)).log10()
}

/// Returns a chart of these lines over an axis; `None` if no line has a point. `max` is the top of the vertical axis; if it is `None`, the
/// top follows from the points.
pub(super) fn chart(title: &str, axis: &Axis, max: Option<f64>, format: fn(f64) -> String, series: &[Series]) -> Option<Chart> {
    let values = series.iter().flat_map(|line| line.points.iter().map(|(_, y)| *y));
    let greatest = values.fold(None, |greatest: Option<f64>, y| Some(greatest.map_or(y, |other| other.max(y))))?;
    let top = max.unwrap_or_else(|| nice_max(greatest));
    let (from, to) = (axis.0.first()?.0, axis.0.last()?.0);
    let at_x = |x: f64| LEFT + (WIDTH - LEFT - RIGHT) * if to > from { ((x - from) / (to - from)).clamp(0.0, 1.0) } else { 0.0 };
    let at_y = |y: f64| TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - (y / top).clamp(0.0, 1.0));
    let rows = (0..=TICKS).map(|tick| {
        let y = top * f64::from(tick) / f64::from(TICKS);
        Tick { at: round(at_y(y)), text: format(y), anchor: "end" }
    });
    let last = axis.0.len() - 1;
    let columns = axis.0.iter().enumerate().map(|(index, (x, text))| {
        let anchor = if index == 0 {
            "start"
        } else if index == last {
            "end"
        } else {
            "middle"
        };
        Tick { at: round(at_x(*x)), text: text.clone(), anchor }
    });
    let lines = series.iter().map(|line| {
        let placed: Vec<(f64, f64)> = line.points.iter().map(|(x, y)| (round(at_x(*x)), round(at_y(*y)))).collect();
        let path = placed.iter().enumerate().map(|(index, (x, y))| format!("{}{x} {y}", if index == 0 { 'M' } else { 'L' }));
        let (path, has_dots) = (path.collect(), placed.len() <= DOTS_MAX && !line.dashed);
        let dots = if has_dots { placed } else { Vec::new() };
        ChartLine { name: line.name.clone(), colour: line.report % COLOURS, dashed: line.dashed, path, dots }
    });
    Some(Chart {
        title: title.to_owned(),
        width: WIDTH,
        height: HEIGHT,
        left: LEFT,
        right: WIDTH - RIGHT,
        rows: rows.collect(),
        columns: columns.collect(),
        lines: lines.collect(),
    })
}

/// Returns the smallest of 1, 2, 5, 10, 20, … times a power of ten that is at least `value`.
fn nice_max(value: f64) -> f64 {
    if value <= 0.0 || !value.is_finite() {
        return 1.0;
    }
    let power = 10_f64.powf(value.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|step| step * power).into_iter().find(|step| *step >= value * 0.999_999).unwrap_or(10.0 * power)
}

/// Rounds a position to a tenth of an SVG unit, which is less than a pixel.
fn round(position: f64) -> f64 {
    (position * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(points: Vec<(f64, f64)>) -> Series {
        Series { name: "a".to_owned(), report: 9, dashed: false, points }
    }

    #[test]
    fn line_spans_the_chart_and_has_dots_if_its_points_are_few() {
        let points = vec![(0.0, 0.0), (5.0, 50.0), (10.0, 100.0)];
        let drawn = chart("t", &Axis::seconds(10.0), None, decimal, &[series(points)]).expect("there are points");
        let [line] = &drawn.lines[..] else { panic!("one line: {drawn:?}") };
        let (middle, right) = (LEFT + (WIDTH - LEFT - RIGHT) / 2.0, WIDTH - RIGHT);
        let bottom = HEIGHT - BOTTOM;
        let centre = (TOP + bottom) / 2.0;
        assert_eq!(line.path, format!("M{LEFT} {bottom}L{middle} {centre}L{right} {TOP}"));
        assert_eq!((&line.dots[..], line.colour), (&[(LEFT, bottom), (middle, centre), (right, TOP)][..], 1));
        assert_eq!(drawn.columns.iter().map(|tick| &*tick.text).collect::<Vec<_>>(), ["0 s", "5 s", "10 s"]);
        assert_eq!(drawn.rows.iter().map(|tick| &*tick.text).collect::<Vec<_>>(), ["0.00", "25.0", "50.0", "75.0", "100"]);
        let many = series((0..100).map(|x| (f64::from(x), 1.0)).collect());
        let drawn = chart("t", &Axis::seconds(100.0), None, decimal, &[many]).expect("there are points");
        assert!(drawn.lines[0].dots.is_empty() && drawn.lines[0].path.matches('L').count() == 99);
    }

    #[test]
    fn chart_without_points_is_not_drawn() {
        assert_eq!(chart("t", &Axis::seconds(1.0), None, decimal, &[series(Vec::new())]), None);
        assert_eq!(chart("t", &Axis::seconds(1.0), None, decimal, &[]), None);
    }

    #[test]
    fn top_of_the_vertical_axis_is_a_round_number() {
        for (value, top) in
            [(0.0, 1.0), (0.7, 1.0), (1.0, 1.0), (1.1, 2.0), (4.0, 5.0), (5.1, 10.0), (1234.0, 2000.0), (f64::NAN, 1.0)]
        {
            assert_eq!(nice_max(value), top, "{value}");
        }
    }

    #[test]
    fn percentile_axis_has_equal_distances_between_p0_p90_p99_and_p99_9() {
        let at: Vec<f64> = [0.0, 90.0, 99.0, 99.9].map(percentile_at).to_vec();
        for (found, expected) in at.iter().zip([0.0, 1.0, 2.0, 3.0]) {
            assert!((found - expected).abs() < 1e-9, "{at:?}");
        }
        assert!(percentile_at(100.0).is_finite() && percentile_at(100.0) > 3.0);
    }
}
