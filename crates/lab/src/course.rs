//! The course of a move as a plot: how fast a guest answered in each tenth of a second before, meanwhile and afterwards.

use plotters::prelude::*;

use crate::outcome::Cell;
use crate::plot::COLOURS;

/// The size of a chart, in pixels of CSS.
const CHART: (u32, u32) = (640, 280);

/// The windows of a second in which answers are counted.
const TENTHS: f64 = 10.0;

/// The courses of all rounds at one point.
#[derive(Clone, Debug)]
pub struct Course<'a> {
    /// What the guest was asked.
    pub workload: &'a str,
    /// The systems, by their places in the report, with their rounds.
    rounds: Vec<(usize, &'a Cell)>,
}

/// A course for each workload in which a guest was asked, of these systems.
#[must_use]
pub fn courses<'a>(cells: impl Iterator<Item = &'a Cell>, systems: &[&str]) -> Vec<Course<'a>> {
    let mut courses: Vec<Course<'a>> = Vec::new();
    for cell in cells.filter(|cell| cell.served.is_some()) {
        let at = systems.iter().position(|system| *system == cell.system).unwrap_or_default();
        match courses.iter_mut().find(|course| course.workload == cell.workload) {
            Some(course) => course.rounds.push((at, cell)),
            None => courses.push(Course { workload: &cell.workload, rounds: vec![(at, cell)] }),
        }
    }
    courses
}

impl Course<'_> {
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
        let served =
            || self.rounds.iter().filter_map(|(at, cell)| Some((*at, cell.served.as_ref()?)));
        let tenths = served().map(|(_, it)| it.by_tenth.len()).max().unwrap_or_default();
        let most = served().flat_map(|(_, it)| it.by_tenth.iter()).max().copied();
        let highest = most.unwrap_or_default().max(1) as f64 * TENTHS * 1.08;
        let area = SVGBackend::with_string(text, CHART).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin(6)
            .caption(format!("{}: requests per second", self.workload), ("sans-serif", 14))
            .x_label_area_size(22)
            .y_label_area_size(52)
            .build_cartesian_2d(0.0..tenths.max(1) as f64 / TENTHS, 0.0..highest)?;
        chart.configure_mesh().light_line_style(TRANSPARENT).disable_x_mesh().draw()?;
        for (at, it) in served() {
            let colour = COLOURS[at % COLOURS.len()];
            // The requests of a tenth are drawn in its middle.
            let points = it.by_tenth.iter().enumerate();
            let line = points
                .map(|(tenth, count)| ((tenth as f64 + 0.5) / TENTHS, *count as f64 * TENTHS));
            // And while it moved.
            let moved = vec![(it.moved.0, 0.0), (it.moved.1, 0.0)];
            chart.draw_series([
                PathElement::new(line.collect::<Vec<_>>(), colour.mix(0.7).stroke_width(2)),
                PathElement::new(moved, colour.mix(0.4).stroke_width(6)),
            ])?;
        }
        drop(chart);
        area.present()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::tests::rounds;
    use crate::outcome::Served;

    #[test]
    fn a_course_has_a_line_for_each_round_of_each_system() {
        let mut cells = rounds(&[1.0, 1.0]);
        // What was not asked has none.
        for cell in &mut cells[1..] {
            let by_tenth = vec![90, 0, 100];
            cell.served = Some(Served { by_tenth, moved: (0.05, 0.15), ..Served::default() });
        }
        let courses = courses(cells.iter(), &["ours", "theirs"]);
        assert_eq!((courses.len(), courses[0].workload), (1, "w"));
        let svg = courses[0].svg().unwrap();
        let of = |at: usize| {
            let RGBColor(red, green, blue) = COLOURS[at];
            svg.matches(&format!("stroke=\"#{red:02X}{green:02X}{blue:02X}\"")).count()
        };
        // Each round has its course and its time.
        assert_eq!((of(0), of(1)), (2, 4), "{svg}");
        assert!(svg.contains("w: requests per second"));
    }
}
