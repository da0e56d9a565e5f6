//! The orders with few preemptions, where there are too many in all: a thread that could continue is stopped for
//! another at most this many times. Where it cannot continue, every other is tried. A fault that occurs in some order
//! mostly occurs in one with two preemptions.

use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};

/// The choices at one step.
struct Choice {
    tasks: Vec<TaskId>,
    chosen: usize,
    /// Whether the first could continue, so that any other preempts it.
    preempts: bool,
}

/// Visits the orders depth first.
pub struct FewPreemptions {
    most: usize,
    begun: bool,
    choices: Vec<Choice>,
    steps: usize,
    preemptions: usize,
}

impl FewPreemptions {
    pub fn new(most: usize) -> Self {
        Self { most, begun: false, choices: Vec::new(), steps: 0, preemptions: 0 }
    }
}

impl Scheduler for FewPreemptions {
    fn new_execution(&mut self) -> Option<Schedule> {
        if self.begun {
            while self.choices.pop_if(|choice| choice.chosen + 1 == choice.tasks.len()).is_some() {}
            self.choices.last_mut()?.chosen += 1;
        }
        (self.begun, self.steps, self.preemptions) = (true, 0, 0);
        Some(Schedule::new(0))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        _is_yielding: bool,
    ) -> Option<TaskId> {
        if self.steps == self.choices.len() {
            let mut tasks: Vec<TaskId> = runnable.iter().map(|task| task.id()).collect();
            let goes_on = tasks.iter().position(|task| Some(*task) == current);
            if let Some(at) = goes_on {
                tasks.swap(0, at);
                if self.preemptions == self.most {
                    tasks.truncate(1);
                }
            }
            self.choices.push(Choice { tasks, chosen: 0, preempts: goes_on.is_some() });
        }
        let choice = &self.choices[self.steps];
        self.steps += 1;
        self.preemptions += usize::from(choice.preempts && choice.chosen > 0);
        Some(choice.tasks[choice.chosen])
    }

    fn next_u64(&mut self) -> u64 {
        unreachable!("a model that chooses at random")
    }
}
