//! A chart of curves over the size, both axes logarithmic, as SVG.

use std::fmt::Write;

use super::super::settings::human;
use super::escape;

/// One system's curve.
#[derive(Clone)]
pub(super) struct Series {
    pub(super) name: String,
    /// Drawn dashed: what the machine allows.
    pub(super) floor: bool,
    pub(super) colour: usize,
    /// Bytes and value, by bytes.
    pub(super) points: Vec<(f64, f64)>,
}

impl Series {
    /// The colour, as the style sheet names it.
    pub(super) fn paint(&self) -> String {
        format!("var(--c{})", self.colour % COLOURS)
    }
}

pub(super) struct Chart<'a> {
    pub(super) title: &'a str,
    pub(super) unit: &'a str,
    pub(super) series: &'a [Series],
}

/// As many as the style sheet has.
const COLOURS: usize = 13;
const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 26.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 34.0;

/// From the least to the greatest of positive values, on a logarithmic scale.
struct Axis {
    from: f64,
    to: f64,
    begin: f64,
    end: f64,
}

impl Axis {
    fn new(values: impl Iterator<Item = f64>, whole: bool, begin: f64, end: f64) -> Self {
        let logs = values.filter(|v| v.is_finite() && *v > 0.0).map(f64::log10);
        let (mut from, mut to) = logs.fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(v), b.max(v)));
        if from > to {
            (from, to) = (0.0, 1.0);
        }
        if whole {
            (from, to) = (from.floor(), to.ceil());
        }
        if to - from < 0.1 {
            (from, to) = (from - 0.5, to + 0.5);
        }
        Self { from, to, begin, end }
    }

    fn at(&self, value: f64) -> f64 {
        let part = (value.max(f64::MIN_POSITIVE).log10() - self.from) / (self.to - self.from);
        self.begin + part * (self.end - self.begin)
    }
}

impl Chart<'_> {
    pub(super) fn svg(&self) -> String {
        let points = || self.series.iter().flat_map(|s| &s.points);
        let x = Axis::new(points().map(|p| p.0), false, LEFT, WIDTH - RIGHT);
        let y = Axis::new(points().map(|p| p.1), true, HEIGHT - BOTTOM, TOP);
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
            escape(self.title)
        );
        let _ = writeln!(svg, "<text x=\"4\" y=\"12\">{}</text>", escape(self.unit));
        self.grid(&mut svg, &x, &y);
        for series in self.series {
            curve(&mut svg, series, &x, &y);
        }
        svg + "</svg>\n"
    }

    fn grid(&self, svg: &mut String, x: &Axis, y: &Axis) {
        for power in y.from as i32..=y.to as i32 {
            let value = 10f64.powi(power);
            let at = y.at(value);
            // Short enough for the margin.
            let value = if power < -3 { format!("1e{power}") } else { value.to_string() };
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"var(--faint)\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                at + 4.0,
            );
        }
        let mut sizes: Vec<_> =
            self.series.iter().flat_map(|s| &s.points).map(|p| p.0 as usize).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let mut last = f64::MIN;
        for bytes in sizes {
            let at = x.at(bytes as f64);
            if at - last < 52.0 {
                continue; // no room for its name
            }
            last = at;
            let _ = writeln!(
                svg,
                "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{:.1}\" stroke=\"var(--faint)\"/>\
                 <text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                HEIGHT - BOTTOM,
                HEIGHT - BOTTOM + 16.0,
                human(bytes),
            );
        }
    }
}

fn curve(svg: &mut String, series: &Series, x: &Axis, y: &Axis) {
    let paint = series.paint();
    let places: Vec<_> = series.points.iter().map(|&(bytes, v)| (x.at(bytes), y.at(v))).collect();
    let path: Vec<_> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let (dash, class) =
        if series.floor { (" stroke-dasharray=\"5 4\"", "floor") } else { ("", "system") };
    let _ = writeln!(
        svg,
        "<polyline class=\"{class}\" points=\"{}\" fill=\"none\" stroke=\"{paint}\" stroke-width=\"2\"{dash}/>",
        path.join(" ")
    );
    for ((at_x, at_y), (bytes, value)) in places.iter().zip(&series.points) {
        let _ = writeln!(
            svg,
            "<circle cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" r=\"3\" fill=\"{paint}\"><title>{}, {}: {value:.3}</title></circle>",
            escape(&series.name),
            human(*bytes as usize),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_stay_within_the_chart() {
        let points = vec![(8.0, 0.2), (1024.0, 0.5), (16e6, 700.0)];
        let series = [Series { name: "a".to_owned(), floor: true, colour: 1, points }];
        let svg = Chart { title: "t", unit: "µs", series: &series }.svg();
        assert!(svg.contains("stroke-dasharray") && svg.matches("<circle").count() == 3);
        for part in svg.split("cx=\"").skip(1) {
            let at: f64 = part.split('"').next().unwrap().parse().unwrap();
            assert!((LEFT..=WIDTH - RIGHT).contains(&at), "{at}");
        }
        let one =
            [Series { name: "a".to_owned(), floor: false, colour: 0, points: vec![(8.0, 1.0)] }];
        assert!(!Chart { title: "t", unit: "µs", series: &one }.svg().contains("NaN"));
    }
}
