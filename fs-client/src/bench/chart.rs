//! Plots: lines over places or numbers, and bars, as SVG and PNG.
//!
//! Text is drawn with a font that is part of the program, so that a plot looks the same on a machine without fonts;
//! an SVG names common families and leaves the choice to whoever shows it. Series have the same colour and marker in
//! every figure.

use anyhow::{Context as _, anyhow};
use plotters::chart::{ChartBuilder, ChartContext, SeriesLabelPosition};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::{FontStyle, RGBColor, register_font};
use std::path::Path;
use std::sync::Once;

/// Pixels of a panel; a figure has one beside the other.
const PANEL_WIDTH: u32 = 640;
const HEIGHT: u32 = 460;
/// Pixels of one line of the legend.
const LEGEND_LINE: u32 = 17;
/// Name under which the font is registered; in an SVG a family that every viewer knows.
const FONT: &str = "sans-serif";
/// What is beside the point.
const QUIET: RGBColor = RGBColor(80, 80, 80);

/// What is above a figure.
#[derive(Clone, Copy, Debug)]
pub(in crate::bench) struct Heading<'a> {
    pub(in crate::bench) title: &'a str,
    pub(in crate::bench) subtitle: &'a str,
}

/// How a panel is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::bench) enum Kind {
    /// Places beside each other, joined by lines.
    Lines,
    /// A bar for each series at each place.
    Bars,
    /// A curve over numbers.
    Curve,
}

/// One series.
#[derive(Clone, Debug)]
pub(in crate::bench) struct Series {
    pub(in crate::bench) label: &'static str,
    pub(in crate::bench) colour: RGBColor,
    /// Number of the place (or the number itself, of a curve) and the value.
    pub(in crate::bench) values: Vec<(f64, f64)>,
}

/// One panel.
#[derive(Clone, Debug)]
pub(in crate::bench) struct Chart {
    pub(in crate::bench) caption: String,
    pub(in crate::bench) kind: Kind,
    pub(in crate::bench) logarithmic: bool,
    pub(in crate::bench) x_label: String,
    pub(in crate::bench) y_label: String,
    /// Names of places; empty for a curve.
    pub(in crate::bench) places: Vec<String>,
    pub(in crate::bench) series: Vec<Series>,
    /// Where something happens, of a curve.
    pub(in crate::bench) marks: Vec<f64>,
}

/// The figure as SVG text.
///
/// # Errors
/// If there is nothing to draw it with.
pub(in crate::bench) fn svg(heading: &Heading<'_>, charts: &[Chart]) -> anyhow::Result<String> {
    register();
    let mut text = String::new();
    {
        let root = SVGBackend::with_string(&mut text, size(charts)).into_drawing_area();
        draw(&root, heading, charts)?;
    }
    Ok(text)
}

/// Writes the figure as a PNG file.
///
/// # Errors
/// If there is nothing to draw it with, or the file cannot be written.
pub(in crate::bench) fn png(path: &Path, heading: &Heading<'_>, charts: &[Chart]) -> anyhow::Result<()> {
    register();
    draw(&BitMapBackend::new(path, size(charts)).into_drawing_area(), heading, charts)
        .with_context(|| format!("cannot write {}", path.display()))
}

fn size(charts: &[Chart]) -> (u32, u32) {
    (PANEL_WIDTH * charts.len().max(1) as u32, HEIGHT)
}

fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // Fails only for bytes that are no font; then drawing says so.
        let _ = register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
    });
}

fn failed<E: std::fmt::Display>(error: E) -> anyhow::Error {
    anyhow!("cannot draw the plot: {error}")
}

fn draw<DB: DrawingBackend>(
    root: &DrawingArea<DB, Shift>,
    heading: &Heading<'_>,
    charts: &[Chart],
) -> anyhow::Result<()> {
    root.fill(&WHITE).map_err(failed)?;
    let (top, panels) = root.split_vertically(58);
    let width = top.dim_in_pixel().0 as i32;
    let centred = |size: i32, colour: &'static RGBColor| {
        use plotters::style::text_anchor::{HPos, Pos, VPos};
        TextStyle::from((FONT, size).into_font()).color(colour).pos(Pos::new(HPos::Center, VPos::Top))
    };
    top.draw(&Text::new(heading.title.to_owned(), (width / 2, 10), centred(22, &BLACK))).map_err(failed)?;
    top.draw(&Text::new(heading.subtitle.to_owned(), (width / 2, 38), centred(14, &QUIET)))
        .map_err(failed)?;
    for (panel, chart) in panels.split_evenly((1, charts.len().max(1))).iter().zip(charts) {
        draw_panel(panel, chart)?;
    }
    root.present().map_err(failed)
}

fn draw_panel<DB: DrawingBackend>(panel: &DrawingArea<DB, Shift>, chart: &Chart) -> anyhow::Result<()> {
    let all = || chart.series.iter().flat_map(|series| &series.values);
    let highest = all().map(|value| value.1).fold(0.0, f64::max).max(1e-3);
    let lowest = all().map(|value| value.1).filter(|y| *y > 0.0).fold(highest, f64::min);
    // The axis goes on so far that the legend, a line for each series, covers nothing.
    let legend_share = f64::from(LEGEND_LINE) * (chart.series.len() as f64 + 1.0) / f64::from(HEIGHT);
    let room = 1.0 / (1.0 - 1.5 * legend_share).max(0.4);
    let x_range = match chart.kind {
        Kind::Curve => 0.0..all().map(|value| value.0).fold(0.1, f64::max),
        Kind::Lines | Kind::Bars => -0.5..chart.places.len().max(1) as f64 - 0.5,
    };
    let mut builder = ChartBuilder::on(panel);
    builder
        .margin(12)
        .margin_right(20)
        .x_label_area_size(46)
        .y_label_area_size(72)
        .caption(&chart.caption, (FONT, 16).into_font());
    if chart.logarithmic {
        // From a whole power of ten on, with room for the legend above what there is.
        let low = 10f64.powf(lowest.log10().floor());
        let high = low * (highest / low).max(3.0).powf(room);
        let context = builder.build_cartesian_2d(x_range, (low..high).log_scale()).map_err(failed)?;
        draw_series(context, chart, low)
    } else {
        let context = builder.build_cartesian_2d(x_range, 0.0..highest * room).map_err(failed)?;
        draw_series(context, chart, 0.0)
    }
}

fn draw_series<'a, DB, Y>(
    mut context: ChartContext<'a, DB, Cartesian2d<RangedCoordf64, Y>>,
    chart: &Chart,
    floor: f64,
) -> anyhow::Result<()>
where
    DB: DrawingBackend + 'a,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let place = |x: &f64| {
        let nearest = x.round();
        let is_place = (x - nearest).abs() < 0.01 && nearest >= 0.0;
        is_place.then(|| chart.places.get(nearest as usize)).flatten().cloned().unwrap_or_default()
    };
    let number = |x: &f64| format!("{x:.0}");
    let axis = |y: &f64| if *y >= 1.0 { format!("{y:.0}") } else { format!("{y}") };
    let mut mesh = context.configure_mesh();
    mesh.x_desc(&chart.x_label)
        .y_desc(&chart.y_label)
        .axis_desc_style((FONT, 15).into_font())
        .label_style((FONT, 13).into_font())
        .bold_line_style(RGBColor(215, 215, 215))
        .light_line_style(RGBColor(240, 240, 240))
        .y_label_formatter(&axis);
    match chart.kind {
        Kind::Curve => {
            mesh.x_label_formatter(&number);
        }
        Kind::Lines | Kind::Bars => {
            // One label a place: twice as many ticks as places put one on each.
            mesh.x_label_formatter(&place).disable_x_mesh().x_labels(2 * chart.places.len().max(1) + 1);
        }
    }
    mesh.draw().map_err(failed)?;
    let top = context.as_coord_spec().get_y_range().end;
    for &mark in &chart.marks {
        let line = [(mark, floor), (mark, top)];
        let style = RGBColor(150, 150, 150).stroke_width(1);
        context.draw_series(DashedLineSeries::new(line, 5, 4, style)).map_err(failed)?;
    }
    let count = chart.series.len().max(1) as f64;
    for (index, series) in chart.series.iter().enumerate() {
        let colour = series.colour;
        let label = series.label;
        match chart.kind {
            Kind::Bars => {
                let width = 0.8 / count;
                let bars = series.values.iter().map(|&(x, y)| {
                    let left = x - 0.4 + width * index as f64;
                    Rectangle::new([(left, floor), (left + width * 0.92, y.max(floor))], colour.filled())
                });
                context
                    .draw_series(bars)
                    .map_err(failed)?
                    .label(label)
                    .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled()));
            }
            Kind::Lines | Kind::Curve => {
                let drawn = context
                    .draw_series(LineSeries::new(series.values.iter().copied(), colour.stroke_width(2)))
                    .map_err(failed)?;
                drawn.label(label).legend(move |(x, y)| {
                    EmptyElement::at((x, y))
                        + PathElement::new([(0, 0), (18, 0)], colour.stroke_width(2))
                        + Circle::new((9, 0), 4, colour.filled())
                });
                if chart.kind == Kind::Lines {
                    let points = series.values.iter().map(|&at| Circle::new(at, 4, colour.filled()));
                    context.draw_series(points).map_err(failed)?;
                }
            }
        }
    }
    context
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .margin(8)
        .legend_area_size(24)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .label_font((FONT, 13).into_font())
        .draw()
        .map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(kind: Kind, logarithmic: bool) -> Chart {
        let series = ["PIN", "TeRM", "RPC"].map(|label| Series {
            label,
            colour: RGBColor(213, 94, 0),
            values: vec![(0.0, 900.0), (1.0, 80.0), (2.0, 0.5)],
        });
        Chart {
            caption: "(a) reads".to_owned(),
            kind,
            logarithmic,
            x_label: "value size (bytes)".to_owned(),
            y_label: "throughput (kops/s)".to_owned(),
            places: ["64", "1K", "16K"].map(str::to_owned).to_vec(),
            series: series.to_vec(),
            marks: vec![1.0],
        }
    }

    const HEADING: Heading<'static> = Heading { title: "Title <here>", subtitle: "tcp, 50 % DRAM" };

    #[test]
    fn an_svg_is_well_formed_and_says_what_it_shows() {
        for (kind, logarithmic) in [(Kind::Lines, true), (Kind::Bars, false), (Kind::Curve, false)] {
            let text = svg(&HEADING, &[chart(kind, logarithmic), chart(kind, false)]).expect("drawn");
            assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"));
            assert_eq!(text.matches("<text").count(), text.matches("</text>").count());
            for part in ["TeRM", "value size", "throughput", "50 % DRAM", "&lt;here"] {
                assert!(text.contains(part), "{part} is missing");
            }
        }
    }

    #[test]
    fn a_png_is_one_and_has_its_size() {
        let directory = tempfile::tempdir().expect("tempdir");
        let path = directory.path().join("a.png");
        png(&path, &HEADING, &[chart(Kind::Bars, true)]).expect("drawn");
        let bytes = std::fs::read(&path).expect("written");
        assert_eq!(bytes[..8], *b"\x89PNG\r\n\x1a\n");
        assert_eq!(bytes[16..20], PANEL_WIDTH.to_be_bytes());
        assert_eq!(bytes[20..24], HEIGHT.to_be_bytes());
        assert!(bytes.ends_with(b"IEND\xaeB`\x82"));
    }

    #[test]
    fn nothing_measured_draws_an_empty_panel() {
        let empty = Chart { series: Vec::new(), places: Vec::new(), ..chart(Kind::Bars, true) };
        assert!(svg(&HEADING, &[empty]).is_ok());
    }
}
