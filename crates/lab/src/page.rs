//! The results as one page for a browser: tables and plots, with nothing loaded from elsewhere.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::claim::Assessed;
use crate::course;
use crate::goals::{Assessment, Compare, Metric, Relation};
use crate::machine::Machine;
use crate::plot;
use crate::report::{Measured, Report, Summary};
use crate::run::RunReport;
use crate::statistics::Interval;
use crate::tables;

/// What sections of `vmseal lab disk` are plotted by; what has no values has no plot.
const OF_DISKS: [Metric; 7] = [
    Metric::Iops,
    Metric::Throughput,
    Metric::CpuPerIo,
    Metric::P50,
    Metric::P99,
    Metric::IdleCpu,
    Metric::IdleWakeups,
];

const STYLE: &str = "
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 1340px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2.2em; border-top: 1px solid #ddd; padding-top: 1em }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .25em .8em; text-align: left; border-bottom: 1px solid #eee }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.plots { display: flex; flex-wrap: wrap; gap: .6em } .plots svg { border: 1px solid #eee }
.systems span { display: inline-block; margin-right: 1.2em } .systems i { display: inline-block; width: .8em; height: .8em; margin-right: .35em }
.met { color: #00674d } .not-met { color: #a33c00; font-weight: 600 } .other { color: #666 }
.claim { background: #f6f6f6; padding: .6em 1em } .note { color: #666 }
";

impl RunReport {
    /// The page.
    #[must_use]
    pub fn page(&self) -> String {
        let title = "vmseal: what encryption costs here";
        let body = html! {
            (heading(title, &self.machine, &self.commit, self.started))
            (goals(&self.goals))
            @for experiment in &self.experiments {
                h2 { (experiment.id) ": " (experiment.title) }
                @if let Some(why) = &experiment.refused {
                    p { "Not measured here: " (why) "." }
                }
                @for point in &experiment.unavailable {
                    p { "Not measured here: " (point.section) ": " (point.why) "." }
                }
                @for cluster in &experiment.clusters {
                    p.note { "Measured on " (cluster.to_string()) "." }
                }
                @if let Some(claim) = &experiment.claim { (claimed(claim)) }
                (plots(&experiment.id, &experiment.measured, &experiment.measures))
                @for measured in &experiment.measured { (numbers(measured)) }
                @if let Some(warning) = tables::disturbance(&experiment.measured) {
                    p.note { (warning) }
                }
            }
        };
        document(title, &body)
    }
}

impl Report {
    /// The page.
    #[must_use]
    pub fn page(&self) -> String {
        let title = "vmseal: disks beside QEMU's storage daemon and nbdkit";
        let body = html! {
            (heading(title, &self.machine, &self.commit, self.started))
            (goals(&self.goals))
            @for measured in &self.sections {
                h2 { (measured.section) ": " (measured.title) }
                @if let Some(settings) = &measured.settings {
                    p.note { (tables::described(settings)) }
                }
                (plots(measured.section, std::slice::from_ref(measured), &OF_DISKS))
                (numbers(measured))
            }
            @for obstacle in &self.obstacles {
                h2 { (obstacle.section) }
                p { "Not measured here: " (obstacle.why) "." }
            }
            @if let Some(warning) = tables::disturbance(&self.sections) { p.note { (warning) } }
        };
        document(title, &body)
    }
}

fn document(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body { (body) }
        }
    };
    page.into_string()
}

fn heading(title: &str, machine: &Machine, commit: &str, started: jiff::Timestamp) -> Markup {
    html! {
        h1 { (title) }
        p { (tables::heading(machine, commit)) br; "Begun " (format!("{started:.0}")) "." }
        p.note {
            "Systems are measured in turn within each round, and compared within a round only. A dot is one round, a \
             thick line the median, a thin line its 95 % bounds, each by itself; fewer than five rounds have no bounds. \
             Ratios hold from machine to machine better than figures do."
        }
    }
}

fn goals(judged: &[Assessment]) -> Markup {
    let measured: Vec<&Assessment> = judged.iter().filter(|it| it.found().is_some()).collect();
    if measured.is_empty() {
        return html! {};
    }
    html! {
        h2 { "Goals" }
        @match plot::goals(judged) {
            Ok(Some(svg)) => {
                p.note { "How far what was found is from each goal: 1 is the goal, to the right is better." }
                div.plots { (PreEscaped(svg)) }
            }
            Ok(None) => {}
            Err(why) => p.note { "The goals cannot be drawn: " (why) },
        }
        table {
            tr { th { "goal" } th { "what" } th { "found" } th { "wanted" } th { "verdict" } }
            @for judged in measured {
                @let goal = &judged.goal;
                tr {
                    td { (goal.name()) }
                    td { (goal.description) }
                    td.number { (found(judged)) }
                    td.number { (wanted(judged)) }
                    td { (verdict(&judged.verdict.to_string())) }
                }
            }
        }
    }
}

fn found(judged: &Assessment) -> String {
    let interval = judged.found();
    let show = |interval: Interval| match judged.goal.compare {
        Compare::Ratio => interval.show(|value| format!("{value:.3}")),
        Compare::Difference | Compare::Alone => judged.goal.metric.show_interval(&interval),
    };
    interval.map(show).unwrap_or_default()
}

fn wanted(judged: &Assessment) -> String {
    let goal = &judged.goal;
    let sign = match goal.relation {
        Relation::AtLeast => '≥',
        Relation::AtMost => '≤',
    };
    match goal.compare {
        Compare::Ratio => format!("{sign} {:.3}", goal.value),
        Compare::Difference | Compare::Alone => {
            format!("{}{sign} {}", goal.of_rounds(), goal.metric.show(goal.value))
        }
    }
}

fn verdict(text: &str) -> Markup {
    let class = match text {
        "met" => "met",
        "not met" => "not-met",
        _ => "other",
    };
    html! { span class=(class) { (text) } }
}

fn claimed(claim: &Assessed) -> Markup {
    html! {
        div.claim {
            p { "Claimed: " (claim.claim.text) ". Here: " (verdict(&claim.verdict.to_string())) "." }
            @if !claim.found.is_empty() {
                table {
                    tr { th { "load" } th { "measure" } th { "found" } th { "claimed" } th {} }
                    @for judged in &claim.found {
                        tr {
                            td { (judged.goal.workload) }
                            td { (judged.goal.metric.title()) }
                            td.number { (found(judged)) }
                            td.number { (wanted(judged)) }
                            td { (verdict(&judged.verdict.to_string())) }
                        }
                    }
                }
            }
            @for why in &claim.left_out { p.note { "Not comparable: " (why) "." } }
        }
    }
}

fn plots(id: &str, measured: &[Measured], measures: &[Metric]) -> Markup {
    let charts = plot::charts(id, measured, measures);
    let systems = plot::systems(measured);
    let courses = course::courses(measured.iter().flat_map(|one| &one.cells), &systems);
    html! {
        p.systems {
            @for (at, system) in systems.iter().enumerate() {
                span { i style={ "background:" (plot::colour(at)) } {} (system) }
            }
        }
        div.plots {
            @for chart in &charts {
                @match chart.svg() {
                    Ok(svg) => (PreEscaped(svg)),
                    Err(why) => p.note { (chart.title) " cannot be drawn: " (why) },
                }
            }
            @for course in &courses {
                @match course.svg() {
                    Ok(svg) => (PreEscaped(svg)),
                    Err(why) => p.note { (course.workload) " cannot be drawn: " (why) },
                }
            }
        }
    }
}

fn numbers(measured: &Measured) -> Markup {
    html! {
        @if !measured.summaries.is_empty() {
            details {
                summary { (measured.section) ", in numbers" }
                table {
                    tr {
                        th { "load" } th { "system" } th { "kIOPS" } th { "MB/s" } th { "CPU of a request, µs" }
                        th { "p50, µs" } th { "p99, µs" } th { "p99.9, µs" } th { "bottleneck" }
                    }
                    @for summary in &measured.summaries {
                        tr {
                            td { (summary.workload) }
                            td { (summary.system) }
                            td.number { (summary.iops.show(|it| format!("{:.1}", it / 1e3))) }
                            td.number { (summary.throughput.show(|it| format!("{:.0}", it / 1e6))) }
                            td.number { (summary.cpu_per_io.show(|it| format!("{:.2}", it / 1e3))) }
                            @for latency in [summary.latency.p50, summary.latency.p99, summary.latency.p999] {
                                td.number { (format!("{:.0}", latency as f64 / 1e3)) }
                            }
                            td { (tables::named(summary.bottleneck)) }
                        }
                    }
                }
            }
        }
        @if measured.summaries.iter().any(Summary::has_more) {
            details {
                summary { (measured.section) ", reads and writes apart" }
                table {
                    tr {
                        th { "load" } th { "system" } th { "read, µs: mean" } th { "p50" } th { "p95" }
                        th { "write, µs: mean" } th { "p50" } th { "p95" } th { "CPU of the storage, µs" }
                    }
                    @for summary in &measured.summaries {
                        tr {
                            td { (summary.workload) }
                            td { (summary.system) }
                            @for value in summary.apart() { td.number { (value) } }
                        }
                    }
                }
            }
        }
        @if !measured.operations.is_empty() {
            @let serves = measured.operations.iter().any(|it| it.served.is_some());
            details {
                summary { (measured.section) ", in numbers" }
                table {
                    tr {
                        th { "operation" } th { "system" } th { "s" } th { "MB/s" }
                        th { "gap, ms" } th { "CPU, s/GiB" }
                        @if serves { th { "requests/s before" } th { "meanwhile" } th { "afterwards" } }
                    }
                    @for summary in &measured.operations {
                        tr {
                            td { (summary.workload) }
                            td { (summary.system) }
                            td.number { (summary.seconds.show(|it| format!("{it:.3}"))) }
                            td.number {
                                @if let Some(rate) = &summary.throughput {
                                    (rate.show(|it| format!("{:.0}", it / 1e6)))
                                }
                            }
                            @for (value, one) in [(summary.gap, 1e6), (summary.cpu_per_gib, 1e9)] {
                                td.number {
                                    @if let Some(value) = value {
                                        (value.show(|it| format!("{:.2}", it / one)))
                                    }
                                }
                            }
                            @for rate in summary.served.iter().flatten() {
                                td.number { (rate.show(|it| format!("{it:.0}"))) }
                            }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::report::tests::report;

    #[test]
    fn a_page_has_all_results_and_loads_nothing() {
        let mut report = report();
        report.machine.cpu = "<script>alert(1)</script>".to_owned();
        let page = report.page();
        assert!(!page.contains("<script"), "names are escaped");
        for part in ["disk.test", "not met", "<svg", "there is no nbdkit"] {
            assert!(page.contains(part), "{part}");
        }
        for elsewhere in ["href=", "src=", "@import", "url("] {
            assert!(!page.contains(elsewhere), "{elsewhere}");
        }
    }
}
