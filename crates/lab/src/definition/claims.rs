//! What the file of an experiment says of the result: a claim, and what is checked of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    AXIS_MAX, AxisValue, Checked, Definition, DefinitionError, LoadSpec, Matter, Operation,
};
use crate::goals::{Compare, Metric, Relation};

/// What is said of the result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// In words.
    pub text: String,
    /// What is to be found for it to be met, each at every point that it is about.
    #[serde(default)]
    pub checks: Vec<Check>,
    /// What must be so here for a comparison to mean something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comparable: Option<Comparable>,
    /// How many processors there must be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<usize>,
}

/// A comparison within each round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// What is compared.
    pub measure: Metric,
    /// The system above the line.
    pub numerator: String,
    /// The system below the line; none where the value is of the other one alone, in the measure's unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub denominator: Option<String>,
    /// What is compared with the value where there is a system below the line: the ratio, or the difference in the measure's unit.
    #[serde(default, skip_serializing_if = "Compare::is_ratio")]
    pub compare: Compare,
    /// On which side of the value that, or what is found alone, must be.
    pub relation: Relation,
    /// The value.
    pub value: f64,
    /// The operations that it is about; all without it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operations: Vec<Operation>,
    /// The loads that it is about, by their ids; all without it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loads: Vec<String>,
    /// The points that it is about, by keys of the matrix; all without it.
    #[serde(default, rename = "where")]
    pub at: BTreeMap<String, AxisValue>,
    /// By which keys the point below the line is another one; the same point without it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub beside: BTreeMap<String, AxisValue>,
}

/// A median that must be in a range.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Comparable {
    /// What is looked at.
    pub measure: Metric,
    /// Of which system.
    pub system: String,
    /// The least.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_least: Option<f64>,
    /// The most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
}

impl Checked<'_> {
    pub(super) fn claim(
        &self,
        definition: &Definition,
        claim: &Claim,
    ) -> Result<(), DefinitionError> {
        let (systems, axes) = (definition.systems(), definition.axes());
        let known = |key: &str, system: &str| match systems.contains(&system) {
            true => Ok(()),
            false => self.refuse(key, system, format!("one of {}", systems.join(", "))),
        };
        self.range("number of claim.checks", claim.checks.len(), (0, AXIS_MAX))?;
        for check in &claim.checks {
            known("claim.checks.numerator", &check.numerator)?;
            let alone = check.denominator.is_none() && !check.beside.is_empty();
            if let Some((axis, value)) = check.beside.first_key_value().filter(|_| alone) {
                let key = format!("claim.checks.beside.{axis}");
                return self.refuse(&key, value, "with a denominator");
            }
            if let Some(denominator) = &check.denominator {
                let key = "claim.checks.denominator";
                known(key, denominator)?;
                if check.numerator == *denominator && check.beside.is_empty() {
                    return self.refuse(key, denominator, "another system");
                }
            }
            self.compare(check)?;
            if !definition.measures.contains(&check.measure) {
                let found = format!("{:?}", check.measure);
                return self.refuse("claim.checks.measure", found, "one of measures");
            }
            let has = |it: &&Operation| match &definition.matter {
                Matter::Operation(matrix, _) => matrix.operations.contains(it),
                Matter::Disk(..) | Matter::Migration(..) => false,
            };
            if let Some(other) = check.operations.iter().find(|it| !has(it)) {
                let allowed = "an operation of matrix.operations";
                return self.refuse("claim.checks.operations", other.id(), allowed);
            }
            let loads: &[LoadSpec] = match &definition.matter {
                Matter::Disk(matrix, _) => &matrix.loads,
                Matter::Operation(..) | Matter::Migration(..) => &[],
            };
            let is_one = |id: &&String| loads.iter().any(|load| load.id == **id);
            if let Some(other) = check.loads.iter().find(|id| !is_one(id)) {
                return self.refuse("claim.checks.loads", other, "a load of matrix.loads");
            }
            self.range("claim.checks.value", check.value, (f64::MIN_POSITIVE, 1e18))?;
            let at = check.at.iter().map(|it| ("where", it));
            for (key, (axis, value)) in at.chain(check.beside.iter().map(|it| ("beside", it))) {
                let key = format!("claim.checks.{key}.{axis}");
                match axes.get(axis.as_str()) {
                    Some(values) if values.contains(value) => {}
                    Some(_) => {
                        return self.refuse(&key, value, format!("a value of matrix.{axis}"));
                    }
                    None => {
                        let all: Vec<_> = axes.keys().copied().collect();
                        return self.refuse(&key, value, format!("keys are {}", all.join(", ")));
                    }
                }
            }
        }
        claim.comparable.iter().try_for_each(|it| known("claim.comparable.system", &it.system))
    }

    /// A difference takes two systems, and one alone has none below the line.
    fn compare(&self, check: &Check) -> Result<(), DefinitionError> {
        let key = "claim.checks.compare";
        match (check.compare, &check.denominator) {
            (Compare::Difference, None) => self.refuse(key, "difference", "with a denominator"),
            (Compare::Alone, Some(_)) => self.refuse(key, "alone", "without a denominator"),
            _ => Ok(()),
        }
    }
}
