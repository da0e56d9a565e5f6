//! Plots as SVG: what each round gave, with medians and their bounds.

use plotters::prelude::*;

use crate::goals::{Assessment, Compare, Metric, Relation};
use crate::report::Measured;
use crate::statistics::Interval;

/// The size of a chart, in pixels of CSS.
const CHART: (u32, u32) = (420, 260);

/// The colours of systems: those of Okabe and Ito, which most people can tell apart.
pub(crate) const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
];

/// The chart of goals ends at this power of two, to either side; what is beyond is drawn at its edge.
const FARTHEST: f64 = 2.0;

/// One measure of one load: a group for each point, and in it all systems.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    /// The load and the measure.
    pub title: String,
    /// The names of the points; a single one has none.
    pub points: Vec<String>,
    /// The systems, with the values of the rounds at each point, in `metric`'s unit.
    pub systems: Vec<(String, Vec<Vec<f64>>)>,
    metric: Metric,
}

/// The systems of an experiment, in the order of their first measurement.
#[must_use]
pub fn systems(measured: &[Measured]) -> Vec<&str> {
    let mut systems: Vec<&str> = Vec::new();
    for one in measured {
        let cells = one.cells.iter().map(|cell| cell.system.as_str());
        for system in cells.chain(one.idle.iter().map(|idle| idle.system.as_str())) {
            if !systems.contains(&system) {
                systems.push(system);
            }
        }
    }
    systems
}

/// The colour of the system at this place of [`systems`], as CSS has it.
#[must_use]
pub fn colour(at: usize) -> String {
    let RGBColor(red, green, blue) = COLOURS[at % COLOURS.len()];
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// The charts of an experiment: one for each load and measure that has values.
#[must_use]
pub fn charts(experiment: &str, measured: &[Measured], measures: &[Metric]) -> Vec<Chart> {
    let suffix = |one: &Measured| one.section.strip_prefix(experiment).unwrap_or("").to_owned();
    let points: Vec<String> = measured.iter().map(suffix).collect();
    let mut loads: Vec<String> = Vec::new();
    for (one, suffix) in measured.iter().zip(&points) {
        let cells = one.cells.iter().map(|cell| cell.workload.strip_suffix(suffix.as_str()));
        for load in cells.flatten().chain(one.idle.first().map(|_| crate::idle::IDLE)) {
            if !loads.iter().any(|known| known == load) {
                loads.push(load.to_owned());
            }
        }
    }
    let mut charts = Vec::new();
    for load in &loads {
        for &metric in measures {
            let of = |system: &str| {
                let point = |(one, suffix): (&Measured, &String)| {
                    // Doing nothing has one name at all points.
                    let idle = load == crate::idle::IDLE;
                    let name = if idle { load.clone() } else { format!("{load}{suffix}") };
                    let values = metric.of(&one.cells, &one.idle, system, &name);
                    values.into_iter().map(|(_, value)| value).filter(|it| it.is_finite()).collect()
                };
                let values: Vec<Vec<f64>> = measured.iter().zip(&points).map(point).collect();
                (system.to_owned(), values)
            };
            let systems: Vec<_> = systems(measured).into_iter().map(of).collect();
            if systems.iter().all(|(_, values)| values.iter().all(Vec::is_empty)) {
                continue;
            }
            let title = format!("{load}: {}, {}", metric.title(), metric.unit().2);
            let points = points.iter().map(|it| it.trim_start_matches('-').to_owned()).collect();
            charts.push(Chart { title, points, systems, metric });
        }
    }
    charts
}

impl Chart {
    /// The chart as an `svg` element.
    ///
    /// # Errors
    /// What cannot be drawn, as text.
    pub fn svg(&self) -> Result<String, String> {
        let mut text = String::new();
        self.draw(&mut text).map_err(|error| error.to_string())?;
        Ok(text)
    }

    fn draw(&self, text: &mut String) -> Result<(), Box<dyn std::error::Error + '_>> {
        let (one, decimals, _) = self.metric.unit();
        let values = self.systems.iter().flat_map(|(_, values)| values.iter().flatten());
        let highest = values.copied().fold(0.0, f64::max) / one;
        let area = SVGBackend::with_string(text, CHART).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin(6)
            .caption(&self.title, ("sans-serif", 14))
            .x_label_area_size(22)
            .y_label_area_size(52)
            .build_cartesian_2d(
                -0.5..self.points.len() as f64 - 0.5,
                0.0..(highest * 1.08).max(f64::MIN_POSITIVE),
            )?;
        let point = |x: &f64| {
            let whole = (x - x.round()).abs() < 1e-6 && *x > -0.25;
            let name = whole.then(|| self.points.get(x.round() as usize)).flatten();
            name.cloned().unwrap_or_default()
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .x_labels(2 * self.points.len() + 1)
            .x_label_formatter(&point)
            .y_labels(5)
            .y_label_formatter(&|value| format!("{value:.decimals$}"))
            .draw()?;
        let width = 0.8 / self.systems.len() as f64;
        for (at, (_, values)) in self.systems.iter().enumerate() {
            let colour = COLOURS[at % COLOURS.len()];
            let middle = (at as f64 - (self.systems.len() as f64 - 1.0) / 2.0) * width;
            let mut medians = Vec::new();
            for (point, rounds) in values.iter().enumerate() {
                let x = point as f64 + middle;
                let Some(interval) = Interval::of(rounds.iter().map(|value| value / one)) else {
                    continue;
                };
                let dots = rounds.iter().map(|value| (x, value / one));
                chart.draw_series(dots.map(|it| Circle::new(it, 2, colour.mix(0.35).filled())))?;
                let (low, high) = (interval.lower, interval.upper);
                if let (Some(low), Some(high)) = (low, high) {
                    let line = vec![(x, low), (x, high)];
                    chart.draw_series([PathElement::new(line, colour.stroke_width(2))])?;
                }
                let half = width * 0.3;
                let line = vec![(x - half, interval.median), (x + half, interval.median)];
                chart.draw_series([PathElement::new(line, colour.stroke_width(3))])?;
                medians.push((x, interval.median));
            }
            if medians.len() > 1 {
                chart.draw_series([PathElement::new(medians, colour.mix(0.5))])?;
            }
        }
        drop(chart);
        area.present()?;
        Ok(())
    }
}

/// How far what was found is from a goal: 1 is the goal, above is better. None where that is no ratio.
fn margin(judged: &Assessment) -> Option<Interval> {
    let goal = &judged.goal;
    let found = match goal.compare {
        Compare::Ratio => judged.ratio,
        Compare::Alone => judged.alone,
        Compare::Difference => None,
    }?;
    let of = |value: f64| match goal.relation {
        Relation::AtLeast => value / goal.value,
        Relation::AtMost => goal.value / value,
    };
    let margin = Interval {
        median: of(found.median),
        lower: found.lower.map(of),
        upper: found.upper.map(of),
    };
    margin.median.is_finite().then_some(margin)
}

/// The goals that were measured, each by how far from it what was found is; none where there is nothing to draw.
///
/// # Errors
/// What cannot be drawn, as text.
pub fn goals(goals: &[Assessment]) -> Result<Option<String>, String> {
    let rows: Vec<(&str, Interval)> = goals
        .iter()
        .filter_map(|judged| Some((judged.goal.id.as_str(), margin(judged)?)))
        .collect();
    if rows.is_empty() {
        return Ok(None);
    }
    let mut text = String::new();
    draw_goals(&rows, &mut text).map_err(|error| error.to_string())?;
    Ok(Some(text))
}

fn draw_goals(
    rows: &[(&str, Interval)],
    text: &mut String,
) -> Result<(), Box<dyn std::error::Error>> {
    let size = (2 * CHART.0, 60 + 20 * rows.len() as u32);
    let area = SVGBackend::with_string(text, size).into_drawing_area();
    let mut chart = ChartBuilder::on(&area)
        .margin(6)
        .x_label_area_size(24)
        .y_label_area_size(210)
        .build_cartesian_2d(-FARTHEST..FARTHEST, -0.5..rows.len() as f64 - 0.5)?;
    let name = |y: &f64| {
        let whole = (y - y.round()).abs() < 1e-6 && *y > -0.25;
        let at = (rows.len() - 1).checked_sub(y.round().max(0.0) as usize);
        let row = at.filter(|_| whole).and_then(|at| rows.get(at));
        row.map_or_else(String::new, |(id, _)| (*id).to_owned())
    };
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .y_labels(2 * rows.len() + 1)
        .y_label_formatter(&name)
        .label_style(("sans-serif", 13))
        .x_labels(5)
        .x_label_formatter(&|x| format!("{}", x.exp2()))
        .draw()?;
    let within = |value: f64| value.log2().clamp(-FARTHEST, FARTHEST);
    let wanted = vec![(0.0, -0.5), (0.0, rows.len() as f64 - 0.5)];
    chart.draw_series([PathElement::new(wanted, BLACK.stroke_width(1))])?;
    for (at, (_, margin)) in rows.iter().enumerate() {
        let y = (rows.len() - 1 - at) as f64;
        let colour = COLOURS[0];
        if let (Some(lower), Some(upper)) = (margin.lower, margin.upper) {
            let line = vec![(within(lower), y), (within(upper), y)];
            chart.draw_series([PathElement::new(line, colour.stroke_width(2))])?;
        }
        chart.draw_series([Circle::new((within(margin.median), y), 4, colour.filled())])?;
    }
    drop(chart);
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn a_chart_has_the_values_of_all_rounds_and_systems() {
        let report = report();
        let section = &report.sections[0];
        let measures = [Metric::Iops, Metric::IdleCpu, Metric::Neighbour];
        let charts = charts(section.section, &report.sections, &measures);
        let titles: Vec<_> = charts.iter().map(|chart| chart.title.as_str()).collect();
        assert_eq!(
            titles,
            ["w: requests per second, kIOPS", "idle: CPU time without work, ns/s"],
            "nothing without values",
        );
        let (system, values) = &charts[0].systems[0];
        assert_eq!((system.as_str(), values[0].len()), ("ours", 5));
        let svg = charts[0].svg().unwrap();
        // Five rounds of two systems.
        assert_eq!(svg.matches("<circle").count(), 10);
        assert!(svg.contains("w: requests per second"), "{svg}");
    }

    #[test]
    fn goals_are_drawn_by_their_distance() {
        let report = report();
        let svg = goals(&report.goals).unwrap().unwrap();
        assert_eq!(svg.matches("<circle").count(), 3);
        assert_eq!(margin(&report.goals[0]).map(|it| it.median > 1.0), Some(true));
        assert_eq!(margin(&report.goals[1]).map(|it| it.median < 1.0), Some(true), "at most");
        assert_eq!(goals(&[]).unwrap(), None);
    }
}
