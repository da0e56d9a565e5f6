//! The server's metrics, for Prometheus (OpenMetrics text).
//!
//! One registry for the process; all parts of the server count here. Labels have bounded sets of values only
//! (routes, kinds of task, names of resources), never ids of requests or tasks. Gauges of the current state (hosts,
//! VMs, alarms, space) are read at each scrape: [`crate::services::metrics`].

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use vmseal_api::problem::Problem;

/// The content type of an exposition.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The bounds of the buckets of requests to server and provider, in seconds: a read of the inventory takes
/// milliseconds, a long poll up to a minute.
const CALL_BUCKETS: [f64; 12] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 25.0, 60.0];

/// The bounds of the buckets of tasks, in seconds: a start takes a second or two, an import hours.
const TASK_BUCKETS: [f64; 10] = [0.1, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 1800.0, 7200.0];

/// A REST request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: String,
    /// The route's pattern.
    route: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    method: String,
    route: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TaskLabels {
    kind: String,
    outcome: &'static str,
}

/// An operation of a key provider.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KeyOperation {
    provider: String,
    operation: &'static str,
    /// `done`, or the code of the problem.
    outcome: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KeyLatency {
    provider: String,
    operation: &'static str,
}

/// A request to a server of a KMS.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KmsRequest {
    provider: String,
    server: String,
    operation: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KmsLatency {
    provider: String,
    server: String,
    operation: String,
}

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

/// The metric families of this process.
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    request_seconds: Histograms<RouteLabels>,
    tasks: Family<TaskLabels, Counter>,
    task_seconds: Histograms<TaskLabels>,
    key_operations: Family<KeyOperation, Counter>,
    key_seconds: Histograms<KeyLatency>,
    kms_requests: Family<KmsRequest, Counter>,
    kms_seconds: Histograms<KmsLatency>,
}

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

/// The metrics of this process.
#[must_use]
pub fn get() -> &'static Metrics {
    &METRICS
}

fn call_histogram() -> Histogram {
    Histogram::new(CALL_BUCKETS)
}

fn task_histogram() -> Histogram {
    Histogram::new(TASK_BUCKETS)
}

impl Metrics {
    fn new() -> Self {
        let mut this = Self {
            registry: Registry::with_prefix("vmseal_server"),
            requests: Family::default(),
            request_seconds: Family::new_with_constructor(call_histogram),
            tasks: Family::default(),
            task_seconds: Family::new_with_constructor(task_histogram),
            key_operations: Family::default(),
            key_seconds: Family::new_with_constructor(call_histogram),
            kms_requests: Family::default(),
            kms_seconds: Family::new_with_constructor(call_histogram),
        };
        let to = &mut this.registry;
        to.register("http_requests", "REST requests, by route and status", this.requests.clone());
        to.register_with_unit(
            "http_request_duration",
            "How long REST requests took, long polls included",
            Unit::Seconds,
            this.request_seconds.clone(),
        );
        to.register("tasks", "Tasks that ended, by kind and outcome", this.tasks.clone());
        to.register_with_unit(
            "task_duration",
            "How long tasks took, from being asked for to their end",
            Unit::Seconds,
            this.task_seconds.clone(),
        );
        to.register(
            "key_operations",
            "Operations of key providers, by outcome",
            this.key_operations.clone(),
        );
        to.register_with_unit(
            "key_operation_duration",
            "How long operations of key providers took",
            Unit::Seconds,
            this.key_seconds.clone(),
        );
        to.register(
            "kms_requests",
            "Requests to the servers of KMSs, by outcome",
            this.kms_requests.clone(),
        );
        to.register_with_unit(
            "kms_request_duration",
            "How long requests to the servers of KMSs took",
            Unit::Seconds,
            this.kms_seconds.clone(),
        );
        this
    }

    /// Counts a REST request.
    pub fn request(&self, method: &str, route: &str, status: u16, took: Duration) {
        let (method, route) = (method.to_owned(), route.to_owned());
        let labels = RouteLabels { method: method.clone(), route: route.clone() };
        self.request_seconds.get_or_create(&labels).observe(took.as_secs_f64());
        self.requests.get_or_create(&RequestLabels { method, route, status }).inc();
    }

    /// Counts a task that has ended.
    pub fn task(&self, kind: &str, outcome: &'static str, took: Duration) {
        let labels = TaskLabels { kind: kind.to_owned(), outcome };
        self.task_seconds.get_or_create(&labels).observe(took.as_secs_f64());
        self.tasks.get_or_create(&labels).inc();
    }

    /// Counts an operation of a key provider that began at `began`, and returns its outcome.
    pub fn key_operation<T>(
        &self,
        provider: &str,
        operation: &'static str,
        began: Instant,
        outcome: Result<T, Problem>,
    ) -> Result<T, Problem> {
        let provider = provider.to_owned();
        let word = match &outcome {
            Ok(_) => "done".to_owned(),
            Err(problem) => crate::store::to_name(&problem.code),
        };
        let latency = KeyLatency { provider: provider.clone(), operation };
        self.key_seconds.get_or_create(&latency).observe(began.elapsed().as_secs_f64());
        let labels = KeyOperation { provider, operation, outcome: word };
        self.key_operations.get_or_create(&labels).inc();
        outcome
    }

    /// Counts a request to a server of a KMS.
    pub fn kms_request(
        &self,
        (provider, server): (&str, &str),
        operation: &str,
        took: Duration,
        outcome: &'static str,
    ) {
        let [provider, server, operation] = [provider, server, operation].map(str::to_owned);
        let latency = KmsLatency {
            provider: provider.clone(),
            server: server.clone(),
            operation: operation.clone(),
        };
        self.kms_seconds.get_or_create(&latency).observe(took.as_secs_f64());
        let labels = KmsRequest { provider, server, operation, outcome };
        self.kms_requests.get_or_create(&labels).inc();
    }

    /// All metrics as text, without the end mark.
    ///
    /// # Errors
    /// The encoder's; our metrics cause none.
    pub fn encode(&self, to: &mut String) -> std::fmt::Result {
        prometheus_client::encoding::text::encode_registry(to, &self.registry)
    }
}
