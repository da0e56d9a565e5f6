//! The ids of operations, by which programs that are made from the document call them: no two may be the same.

use serde_json::Value;

/// What all paths begin with.
const BASE: &str = "/api/v1/";

/// Gives each operation the id that its method and its path make: `post_vms_vm_start`.
pub(super) fn set(document: &mut Value) {
    let paths = document["paths"].as_object_mut().into_iter().flatten();
    for (path, operations) in paths {
        for (method, operation) in operations.as_object_mut().into_iter().flatten() {
            operation["operationId"] = id(method, path).into();
        }
    }
}

fn id(method: &str, path: &str) -> String {
    let words = path.strip_prefix(BASE).unwrap_or(path).replace(['{', '}'], "");
    format!("{method}_{}", words.replace(['/', '-', '.'], "_"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_two_operations_have_one_id() {
        assert_eq!(id("post", "/api/v1/vms/{vm}/start"), "post_vms_vm_start");
        let document = crate::routes::document();
        let mut ids = BTreeSet::new();
        for (path, operations) in document["paths"].as_object().unwrap() {
            for (method, operation) in operations.as_object().unwrap() {
                let id = operation["operationId"].as_str().unwrap().to_owned();
                assert!(ids.insert(id), "{method} {path}");
            }
        }
    }
}
